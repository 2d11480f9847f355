"""A trainer's rank of examples/vllm_rl.py: loop.py FOLDER STORE PORT WORKERS. The server's HTTP is
the file of ``trainer.Client``; what it says are tokens of chance, since vLLM runs no model here."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from examples import vllm_rl
from meshwise.bridges import plugin
from tests.bridges.trainer import Client, saved


class Server(Client):
    asked = 0

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        assert dist.get_rank() or len(self.versions) == self.asked  # a version for each rollout
        self.asked += 1
        return torch.randint(250, (len(prompts), vllm_rl.NEW_TOKENS)).tolist()

    def shutdown_weight_transfer_engine(self) -> None:
        self.call("shutdown_weight_transfer_engine")


def main(folder: str, path: str, port: str, workers: str) -> None:
    dist.init_process_group("gloo")
    plugin.register()
    (config,) = Path(folder).iterdir()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config), dtype=torch.bfloat16
    )
    server = Server(path, config.name, int(workers))
    vllm_rl.train(model, server, f"127.0.0.1:{port}", steps=2)
    there = saved(model, Path(path).parent / "trained")
    if dist.get_rank() == 0:
        server.call("compare", path=there)
        server.call("stop")
        print(f"versions {server.versions}, as vLLM loads the last", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
