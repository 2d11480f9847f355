"""Which sizes of a model the degrees of a layout must divide; needs no device.

In: model, workload and the layout within one pipeline rank (``Layout.of_rank``). Out: nothing, or a
ValueError that names the degree and the size.
"""

from meshwise.spec import AnyModel, Decoder, Layout, WideResNet, Workload

Degree = tuple[str, int]


def check(model: AnyModel, workload: Workload, layout: Layout) -> None:
    """Refuse, by name, a layout that this model and sequence length cannot be cut into."""
    for name, size, (axis, degree) in _divided(model, workload, layout):
        if size % degree:
            raise ValueError(f"Layout.{axis} = {degree}: must divide {name} = {size}")
    if isinstance(model, WideResNet):
        _check_images(workload, layout)
        return
    if isinstance(model, Decoder):
        model.check_computed()
        model.check_rotary()
        if reason := over_tp(model, layout.tp):
            raise ValueError(f"Layout.tp = {layout.tp}: {reason}; use 1")
    kv_heads = model.kv_heads if isinstance(model, Decoder) and model.mla is None else layout.tp
    if kv_heads % layout.tp and layout.tp % kv_heads:
        raise ValueError(
            f"Layout.tp = {layout.tp}: must divide kv_heads = {kv_heads} or be a multiple"
        )
    if (layout.tp - 1) * -(-model.vocab // layout.tp) >= model.vocab:
        raise ValueError(
            f"Layout.tp = {layout.tp}: some rank would have no share of vocab = {model.vocab}; "
            "use less"
        )
    if layout.ep > 1 and model.experts is None:
        raise ValueError(f"Layout.ep = {layout.ep}: the model has no experts; use 1")
    if workload.seq_len > model.max_seq_len:
        raise ValueError(
            f"Workload.seq_len = {workload.seq_len}: must be <= max_seq_len = {model.max_seq_len} "
            "of the model"
        )


def over_tp(model: AnyModel, tp: int) -> str | None:
    """Why a model cannot be split over tp whatever its sizes, or None."""
    if tp == 1 or not isinstance(model, Decoder) or not model.qk_norm:
        return None
    whole = model.qk_norm_over == "projection"
    return "q and k are normed over all heads (qk_norm_over), which tp divides" if whole else None


def _check_images(workload: Workload, layout: Layout) -> None:
    if layout.cp > 1:
        raise ValueError(f"Layout.cp = {layout.cp}: images have no sequence to share; use 1")
    if layout.ep > 1:
        raise ValueError(f"Layout.ep = {layout.ep}: the model has no experts; use 1")
    if layout.sequence_parallel:
        raise ValueError("Layout.sequence_parallel = true: images have no sequence; set it false")
    if workload.seq_len != 1:
        raise ValueError(f"Workload.seq_len = {workload.seq_len}: of images it is 1; leave it out")


def _divided(model: AnyModel, workload: Workload, layout: Layout) -> list[tuple[str, int, Degree]]:
    """Sizes that a degree must divide, by name."""
    tp = ("tp", layout.tp)
    if isinstance(model, WideResNet):
        return [("channels * width_factor", model.channels * model.width_factor, tp)]
    rules = [("heads", model.heads, tp), ("seq_len", workload.seq_len, ("cp", layout.cp))]
    moe = model.experts
    if moe is None or not all(map(moe.are_in, range(model.layers))):
        rules.append(("ffn", model.ffn, tp))
    if moe is not None:
        rules.append(("experts.num_experts", moe.num_experts, ("ep", layout.ep)))
        rules += [("experts.ffn", moe.ffn, tp), ("experts.shared_ffn", moe.shared_ffn, tp)]
    if layout.sequence_parallel:
        rules.append(("seq_len / cp", workload.seq_len // layout.cp, tp))
    return rules
