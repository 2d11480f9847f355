"""Reinforcement learning with transformers, FSDP2 and a vLLM server: roll out, step, send weights.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "meshwise"}'
    torchrun --nproc-per-node 2 examples/vllm_rl.py MODEL http://localhost:8000 localhost:29600

The model learns to say even tokens. The last word is where trainers and vLLM's workers meet.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import clients, factory  # type: ignore[import-not-found]

from meshwise.bridges.vllm import TrainerInfo

PROMPTS, NEW_TOKENS = [[1, 2, 3]] * 8, 16


class Server(clients.HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        import requests  # type: ignore[import-untyped]

        asked = {"prompt": prompts, "max_tokens": NEW_TOKENS, "return_token_ids": True}
        told = requests.post(f"{self.base_url}/v1/completions", json=asked, timeout=self.timeout)
        return [choice["token_ids"] for choice in told.json()["choices"]]


def step(model: Any, optimizer: torch.optim.Optimizer, said: list[list[int]]) -> float:
    """One step of REINFORCE on what the server said; the mean reward."""
    tokens = torch.tensor([p + s for p, s in zip(PROMPTS, said, strict=True)]).to(model.device)
    rewards = (tokens[:, -NEW_TOKENS:] % 2 == 0).float()
    scores = model(input_ids=tokens[:, :-1]).logits[:, -NEW_TOKENS:].float().log_softmax(-1)
    chosen = scores.gather(-1, tokens[:, -NEW_TOKENS:, None]).squeeze(-1)
    (-(rewards - rewards.mean()) * chosen).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item()


def train(model: Any, server: Server, address: str, steps: int = 20) -> None:
    for part in (*model.model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    info = TrainerInfo(address=address, rank=dist.get_rank())
    engine = factory.WeightTransferTrainerFactory.trainer_init(info, client=server, source=model)
    for number in range(1, steps + 1):
        reward = step(model, optimizer, server.generate(PROMPTS))
        engine.send_weights()  # the server now has the version of this number
        if info.rank == 0:
            print(f"step {number}: reward {reward:.2f}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    dist.init_process_group()
    train(AutoModelForCausalLM.from_pretrained(sys.argv[1]), Server(sys.argv[2]), sys.argv[3])
