"""Show a model: its sizes, how many parameters it has, and where they are."""

from math import prod

from meshwise.models import counts
from meshwise.models.decoder import weights
from meshwise.pages.table import Table, listed, percent
from meshwise.spec import AnyModel, Decoder, WideResNet
from meshwise.units import format_bytes, format_count

STATE_BYTES = 16  # fp32 master, gradient and Adam's two moments, of a parameter


def of(model: AnyModel) -> list[Table]:
    """Return its sizes, and its weights by name, the most elements first."""
    found = weights(model)
    total = sum(weight.num_elements for weight in found)
    rows = [*_sizes(model), ("parameters", format_count(total))]
    if not isinstance(model, WideResNet) and (used := counts.active_parameters(model)) != total:
        rows.append(("a token is multiplied with", format_count(used)))
    rows += [
        ("weights in bf16", format_bytes(2 * total)),
        ("trained in fp32 by Adam", format_bytes(STATE_BYTES * total)),
    ]
    named: dict[tuple[str, tuple[int, ...]], int] = {}
    for weight in found:
        name = weight.name.replace(f"{weight.unit}.", "layers.*.")
        named[name, weight.shape] = named.get((name, weight.shape), 0) + 1
    by_size = sorted(named.items(), key=lambda item: -item[1] * prod(item[0][1]))
    each = listed(
        "Weights",
        by_size,
        ("name", lambda item: item[0][0]),
        ("shape", lambda item: " x ".join(map(str, item[0][1]))),
        ("times", lambda item: item[1]),
        ("of all", lambda item: item[1] * prod(item[0][1]) / total, percent),
        left=2,
    )
    family = type(model).__struct_config__.tag
    return [Table(f"Model {model.name} ({family})", ("", ""), tuple(rows), left=2), each]


def _sizes(model: AnyModel) -> list[tuple[str, str]]:
    if isinstance(model, WideResNet):
        blocks = " + ".join(map(str, model.blocks))
        return [("blocks", blocks), ("channels", f"{model.channels}, x {model.width_factor}")]
    heads = f"{model.heads}"
    if isinstance(model, Decoder):
        heads += f" of {model.head_dim}"
        heads += ", latent keys and values" if model.mla else f", {model.kv_heads} of k and v"
    experts = model.experts
    return [
        ("layers", str(model.layers)),
        ("hidden", str(model.hidden)),
        ("heads", heads),
        ("feed-forward", str(model.ffn)),
        *([("experts", f"{experts.num_experts}, {experts.top_k} a token")] if experts else []),
        ("vocabulary", str(model.vocab)),
        ("tokens of a sequence", f"{model.max_seq_len}"),
    ]
