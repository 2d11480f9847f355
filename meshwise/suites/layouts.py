"""Turn a case into our records: its model, workload, layout and recipe.

A case's logical mesh (a, b) becomes dp = a and tp = b, and stages may have different meshes. The
case does not have what Alpa's solver chose within a mesh. We choose:

- prefer_reduce_scatter turns all-reduce into reduce-scatter and all-gather: zero = 2 if dp > 1,
  and for transformers sequence parallelism if tp > 1.
- use_remat: every layer is recomputed.
- Experts: if the batch dim is pinned to the first axis, the solver cannot use that axis for them,
  and tp splits each expert: ep = 1. Without the pin it divides experts over that axis: ep is the
  largest divisor of dp that divides the number of experts. Dense parts always keep dp and tp.
- Tokens are dispatched in groups of expert_group_size, or of a microbatch's tokens if these are
  fewer. In each group an expert takes at most an equal share (alpa/model/moe.py: C = 2 S // E).
- Inference: forward only, in gpipe order; nothing is recomputed or sharded by ZeRO.
"""

from math import gcd

from msgspec.structs import replace

from meshwise.models import catalogue
from meshwise.spec import Decoder, Experts, Layout, Model, Recipe, WideResNet, Workload
from meshwise.suites import source
from meshwise.suites.case import (
    BenchmarkCase,
    GPTModelConfig,
    LoadSolutionParallelArgs,
    ModelConfig,
    MoEModelConfig,
    SearchParallelArgs,
    UniformParallelArgs,
    WResNetModelConfig,
)

_FAMILY = {GPTModelConfig: "gpt", MoEModelConfig: "moe", WResNetModelConfig: "wresnet"}


def model(case: BenchmarkCase) -> Model | WideResNet:
    """Return a case's model: the catalogue's if the sizes match. Experts get a capacity."""
    found = _sized(case.model_config)
    if isinstance(found, WideResNet) or found.experts is None:
        return found
    limits = {"capacity_factor": 1.0, "group_size": group_size(case)}
    return replace(found, experts=replace(found.experts, **limits))


def group_size(case: BenchmarkCase) -> int:
    """Return how many tokens are dispatched to experts together."""
    config = case.model_config
    assert isinstance(config, MoEModelConfig)
    tokens = case.batch_size * config.seq_len // case.num_micro_batches
    return min(config.expert_group_size, tokens)


def _sized(config: ModelConfig) -> Model | WideResNet:
    family = _FAMILY[type(config)]
    known = {config: size for size, config in source.configs(family).items()}
    if config in known:
        found = catalogue.find_any(f"{family}-{known[config].lower()}")
        assert not isinstance(found, Decoder)
        return found
    assert not isinstance(config, WResNetModelConfig), "all its sizes are in the catalogue"
    ffn, experts = 4 * config.hidden_size, None
    if isinstance(config, MoEModelConfig):
        ffn = 8 * config.hidden_size
        # in layers 0, 2, 4 and so on (alpa/model/moe.py)
        experts = Experts(num_experts=config.num_experts, top_k=2, ffn=ffn, every=2)
    return Model(
        name=f"{family}-h{config.hidden_size}-l{config.num_layers}",
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        ffn=ffn,
        vocab=config.vocab_size,
        max_seq_len=config.seq_len,
        experts=experts,
    )


def workload(case: BenchmarkCase) -> Workload:
    """Return the batch of a step. An image counts as a sequence of length 1."""
    config = case.model_config
    seq_len = 1 if isinstance(config, WResNetModelConfig) else config.seq_len
    return Workload(global_batch_size=case.batch_size, seq_len=seq_len)


def dtype(case: BenchmarkCase) -> str:
    """Return the dtype of a case: bf16 for the source's fp16."""
    config = case.model_config
    is_fp32 = isinstance(config, WResNetModelConfig) and config.dtype == "fp32"
    return "fp32" if is_fp32 else "bf16"


def recipe(case: BenchmarkCase) -> Recipe:
    """Return the source's recipe (benchmark_one_case_*.py): no clipping, and for Wide-ResNet the
    learning rate at the end of its warm-up."""
    if isinstance(case.model_config, WResNetModelConfig):
        return Recipe(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, max_grad_norm=0.0)
    if isinstance(case.model_config, MoEModelConfig):
        return Recipe(
            optimizer="adafactor", learning_rate=0.01, weight_decay=0.0, max_grad_norm=0.0
        )
    return Recipe(learning_rate=0.01, weight_decay=1e-4, max_grad_norm=0.0)


def layout(
    case: BenchmarkCase, num_devices: int, *, inference: bool = False, shard_only: bool = False
) -> Layout:
    """Return the layout of a case on ``num_devices`` GPUs, by the rules in the module's docstring.

    ``inference``: the suite runs the forward pass only. ``shard_only``: refuse pipelines. Raise
    ValueError for a search, another number of devices, or a batch that does not divide.
    """
    meshes, stage_layers = _meshes(case), _stage_layers(case)
    pp = len(meshes)
    if shard_only and pp > 1:
        raise ValueError(f"the case has {pp} pipeline stages; run it without --shard-only")
    needed = sum(dp * tp for dp, tp in meshes)
    if needed != num_devices:
        raise ValueError(
            f"the case needs {needed} devices, not {num_devices}; give --num-hosts and "
            f"--num-devices-per-host whose product is {needed}"
        )
    widest_dp, widest_tp = (max(sizes) for sizes in zip(*meshes, strict=True))
    equal = len(set(meshes)) == 1
    dp, tp = meshes[0] if equal else (1, 1)
    scatter = case.parallel_args.prefer_reduce_scatter and not inference
    is_transformer = not isinstance(case.model_config, WResNetModelConfig)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        ep=_expert_degree(case, meshes),
        zero=2 if scatter and widest_dp > 1 else 0,
        sequence_parallel=scatter and is_transformer and widest_tp > 1,
        microbatch_size=_rows(case, meshes) // dp,
        num_microbatches=case.num_micro_batches,
        schedule="none" if pp == 1 else "gpipe" if inference else "1f1b",
        recompute="full" if case.parallel_args.use_remat and not inference else "none",
        layers=stage_layers if len(set(stage_layers)) > 1 else (),
        meshes=() if equal else meshes,
    )


def _meshes(case: BenchmarkCase) -> tuple[tuple[int, int], ...]:
    """Return (dp, tp) of each stage."""
    args = case.parallel_args
    if isinstance(args, SearchParallelArgs):
        raise ValueError("parallel_mode = 'search': the case has no layout; search one")
    if isinstance(args, LoadSolutionParallelArgs):
        return tuple(args.submesh_logical_shapes)
    if isinstance(args, UniformParallelArgs):
        return ((args.dp, args.op),) * args.pp
    return (args.logical_mesh_shape,)


def _stage_layers(case: BenchmarkCase) -> tuple[int, ...]:
    """Return how many of the model's layers each stage has."""
    args, layers = case.parallel_args, model(case).layers
    if isinstance(args, LoadSolutionParallelArgs):
        clusters = [len(ids) for ids in args.forward_stage_layer_ids]
    else:
        clusters = [1] * len(_meshes(case))
    if layers % sum(clusters):
        raise ValueError(
            f"num_layers = {layers}: must be a multiple of the {sum(clusters)} equal parts that "
            "the case cuts it into"
        )
    return tuple(layers // sum(clusters) * count for count in clusters)


def _rows(case: BenchmarkCase, meshes: tuple[tuple[int, int], ...]) -> int:
    """Return the number of sequences or images in a microbatch."""
    rows, rest = divmod(case.batch_size, case.num_micro_batches)
    if rest or any(rows % dp for dp, _ in meshes):
        degrees = ", ".join(map(str, sorted({dp for dp, _ in meshes})))
        raise ValueError(
            f"batch_size = {case.batch_size}: must be a multiple of num_micro_batches = "
            f"{case.num_micro_batches} times each dp = {degrees}"
        )
    return rows


def _expert_degree(case: BenchmarkCase, meshes: tuple[tuple[int, int], ...]) -> int:
    config, args = case.model_config, case.parallel_args
    if not isinstance(config, MoEModelConfig):
        return 1
    if isinstance(args, LoadSolutionParallelArgs):
        pinned = any(args.submesh_autosharding_option_dicts)
    else:
        assert not isinstance(args, SearchParallelArgs)  # refused before
        pinned = args.force_batch_dim_mapping
    return 1 if pinned else gcd(config.num_experts, *(dp for dp, _ in meshes))
