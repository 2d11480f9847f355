"""Megatron-core's GPTModel of a Hugging Face config, on CPU ranks over gloo.

Its forward runs with stand-ins for the current CUDA device and for CUDA's random numbers (there is
no dropout), and for latent attention's core, which it has for GPUs alone. The weights, their order
and the rest of the mathematics are Megatron's.
"""

import contextlib
import itertools
import re
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from meshwise.bridges import megatron
from meshwise.bridges.renamed import renamed
from meshwise.reshard import live
from meshwise.reshard.regions import Box

MULTIPLE = 64  # of the vocabulary's rows: 250 become 256
VERSIONS = itertools.count()
TOLERANCE = 1e-4  # of fp32's rounding in two implementations, of the logits' standard deviation


class LatentAttention(nn.Module):
    """softmax(q k / sqrt(d)) v, where v is narrower than q and k. It has no weights."""

    def __init__(self, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # [s, b, heads, d]
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return made.permute(2, 0, 1, 3).flatten(2)


def placed(tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, chunks: int = 1) -> None:
    """Divide the ranks as Megatron does."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *_: self
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def experts_of(config: PretrainedConfig) -> dict[str, object]:
    """Megatron's options of a mixture of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for name in names if (n := getattr(config, name, None))), None)
    if count is None:
        return {}
    found = {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }
    if config.model_type == "qwen2_moe":
        found["moe_shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        found["moe_shared_expert_gate"] = True
    elif config.model_type == "deepseek_v3":
        found |= {
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size,
            "moe_layer_freq": [int(n >= 1) for n in range(config.num_hidden_layers)],
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": config.n_group,
            "moe_router_group_topk": config.topk_group,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_dtype": "fp32",
        }
    return found


def attention_of(config: PretrainedConfig) -> dict[str, object]:
    if config.model_type != "deepseek_v3":
        return {
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": getattr(config, "head_dim", None),
            "add_qkv_bias": config.model_type in ("qwen2", "qwen2_moe"),
            "qk_layernorm": "qwen3" in config.model_type,
        }
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
        "qk_layernorm": True,
    }


def built(config: PretrainedConfig, chunks: int = 1) -> list[nn.Module]:
    """Make this rank's model chunks, in fp32."""
    attention = attention_of(config)
    kind = MLATransformerConfig if "q_lora_rank" in attention else TransformerConfig
    options = kind(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        **experts_of(config),
        **attention,
    )
    rows = -(-config.vocab_size // MULTIPLE) * MULTIPLE
    made = []
    for stage in range(chunks):
        at = {"ignore_virtual": False, "vp_stage": stage if chunks > 1 else None}
        spec = get_gpt_decoder_block_spec(
            options, use_transformer_engine=False, normalization="RMSNorm", vp_stage=at["vp_stage"]
        )
        for layer in spec.layer_specs if kind is MLATransformerConfig else ():
            layer.submodules.self_attention.submodules.core_attention = LatentAttention
        made.append(
            GPTModel(
                options, spec, rows, config.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(**at),
                post_process=parallel_state.is_pipeline_last_stage(**at),
                position_embedding_type="rope",
                rotary_base=config.rope_parameters["rope_theta"],
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                vp_stage=at["vp_stage"],
            ).eval()
        )  # fmt: skip
    return made


def step(chunks: list[nn.Module]) -> None:
    """Give every weight new values, which bf16 can hold; ranks that have the same part get the
    same, by what Megatron says of a parameter."""
    version = next(VERSIONS)
    for chunk in map(megatron.unwrapped, chunks):
        for name, parameter in live.named(chunk).items():  # and the routers' biases
            key = f"{version} {unique(chunk, name, parameter)}"
            values = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            new = 0.15 * torch.randn(parameter.shape, generator=values)
            if "layernorm" in name:
                new += 1
            parameter.data.copy_(new.bfloat16())


def unique(chunk: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Name a parameter's part as no other part is named."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"
    if local := re.match(r"decoder\.layers\.(\d+)", name):
        number = chunk.decoder.layers[int(local[1])].layer_number
        name = f"{number}{name[local.end() :]}"
    if ".local_experts." in name:
        ep = parallel_state.get_expert_model_parallel_rank()
        return f"{name} {ep} {parallel_state.get_expert_tensor_parallel_rank()}"
    if getattr(parameter, "tensor_model_parallel", False):
        return f"{name} {parallel_state.get_tensor_model_parallel_rank()}"
    return name


@torch.no_grad()
def logits(chunks: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Run the forward stage by stage; every rank gets the logits."""
    chunks = [*map(megatron.unwrapped, chunks)]
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    masked = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    hidden = torch.empty(tokens.shape[1], tokens.shape[0], chunks[0].config.hidden_size)
    for chunk in chunks:
        for rank in ranks:
            if rank == here:
                chunk.set_input_tensor(hidden)
                made = chunk(tokens, positions, masked, runtime_gather_output=True)
            last = chunk is chunks[-1] and rank == ranks[-1]
            if last and rank != here:
                made = torch.empty(*tokens.shape, chunk.vocab_size)
            elif rank != here:
                made = hidden
            dist.broadcast(made.contiguous(), rank, group=group)
            hidden = made
    return hidden


def made(folder: Path) -> list[nn.Module]:
    """Make the model of a folder called as in ``llama@megatron-2-1-1-1-1`` (tp, pp, ep, etp, chunks
    of a rank), ready for training: its weights are parts of Megatron's buffers."""
    degrees = [*map(int, folder.name.split("-")[-5:])]
    placed(*degrees)
    how = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return [
        DistributedDataParallel(chunk.config, how, chunk)
        for chunk in built(AutoConfig.from_pretrained(folder), degrees[-1])
    ]


def of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(map(slice, box.low, box.high))]


def saved(chunks: list[nn.Module], folder: Path) -> str:
    """Write the weights as Hugging Face names them. The judge is the forward: transformers' logits,
    with what is written, are Megatron's."""
    config = folder.parent / "models" / folder.name.rpartition("-")[0]
    tokens = torch.randint(250, (2, 24), generator=torch.Generator().manual_seed(7))
    expected = logits(chunks, tokens)[..., :250]
    source = megatron.source(chunks, config)
    shapes, same, _ = source.saved()
    own = live.tensors(source.module)
    parts = [
        (name, piece.box, of(own[piece.buffer], piece.local(piece.box)).clone())
        for name, held in renamed(source.held(dist.get_rank()), shapes, same).items()
        for piece in held.layout
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    if dist.get_rank() == 0:
        whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        for name, box, part in (each for rank in everyone for each in rank):
            there = of(whole[name], box)
            assert torch.equal(there, part) or there.isnan().all(), f"{name}: ranks differ"
            there.copy_(part)
        AutoConfig.from_pretrained(config).save_pretrained(folder)
        checkpoint = {name: tensor.bfloat16() for name, tensor in whole.items()}
        save_file(checkpoint, folder / "model.safetensors", {"format": "pt"})
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(told.values()), told
        with torch.no_grad():
            found = model(tokens).logits
        worst = float((found - expected).abs().max() / expected.std())
        assert worst < TOLERANCE, f"{folder.name}: logits differ by {worst:.2g} of their spread"
        print(f"{config.name}: transformers' logits are Megatron's to {worst:.1g}", flush=True)
    dist.barrier()
    return str(folder)
