"""``measure layer``: a model's layers and head over tp, cp and ep. No torch.

Every legal combination of the degrees is measured, at each microbatch size, with and without
sequence parallelism. Sizes vary fastest. Of recomputed layers only the backward differs.
"""

from itertools import product

from msgspec.structs import replace

from meshwise.models import blocks_of, placement
from meshwise.models.catalogue import default_model
from meshwise.options.measure import LayerOptions
from meshwise.prices import in_step
from meshwise.probe.cases.profile import profile_of
from meshwise.probe.cases.scope import Scope, in_fp8, models_of, refuse_none_in_fp8, with_fp8
from meshwise.spec import Case, Layout


def cases(scope: Scope, asked: LayerOptions) -> list[Case]:
    """List the blocks, none twice: kind by kind, forward and backward next to each other."""
    profile, found = profile_of(scope, asked.lowering, asked.seq_len), dict[Case, None]()
    obstacles, ranks, fp8 = list[str](), scope.world_size, in_fp8(asked.recipe, scope)
    for model in models_of(asked) or (default_model(scope.cluster),):
        seq_len = profile.length(model)
        sizes = asked.microbatch_sizes or profile.microbatches(model)
        for tp, cp, ep in product(asked.tp, asked.cp, asked.ep):
            if ranks % (tp * cp) or (ranks // tp) % ep:
                obstacles.append(f"tp = {tp}, cp = {cp}, ep = {ep}: do not divide {ranks} ranks")
                continue
            for by_position, size in product((True, False)[tp == 1 :], sizes):
                layout = Layout(
                    dp=ranks // (tp * cp), tp=tp, cp=cp, ep=ep, microbatch_size=size,
                    sequence_parallel=by_position,
                )  # fmt: skip
                if reason := placement.obstacle(model, seq_len, layout):
                    obstacles.append(reason)
                    continue
                blocks = blocks_of(model, seq_len, layout, scope.dtype).values()
                for block, word in product(with_fp8(blocks, fp8), asked.recompute):
                    if word != "none" and (block.part, block.direction) != ("layer", "backward"):
                        continue
                    op = replace(block, recompute=word)
                    how = in_step(op, scope.cluster, profile.lowering)
                    found[Case(op=op, world_size=ranks, **how._asdict())] = None
    if not found:
        raise ValueError("; ".join(dict.fromkeys(obstacles)))
    if fp8:
        refuse_none_in_fp8(found)
    return list(found)
