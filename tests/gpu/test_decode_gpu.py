"""Decoding on GPUs: kernels of one token against their definition in float64, and the tokens of a
graph against those of the plain module."""

import functools

import pytest

torch = pytest.importorskip("torch")

from meshwise import ranks  # noqa: E402
from meshwise.engine import decode, greedy  # noqa: E402
from meshwise.nn import build  # noqa: E402
from meshwise.parallel import mesh  # noqa: E402
from meshwise.spec import Layout  # noqa: E402
from tests.dist import test_decode as on_cpu  # noqa: E402
from tests.dist.conftest import _plan  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def one_rank():
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield ranks.alone("cuda")
    torch.distributed.destroy_process_group()


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("n", "k"), [(6, 16), (101, 48), (257, 2048), (1024, 3584), (64, 14336)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_times_a_matrix(n, k, dtype, biased):
    from meshwise.parallel import token_kernels

    x, weight = randn(1, 1, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5
    bias = randn(n, dtype=dtype) if biased else None
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    found = token_kernels.linear(x, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("at", [0, 63, 64, 200, 9000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"),
    [(4, 4, 8, 8), (32, 8, 128, 128), (6, 2, 80, 80), (4, 4, 192, 128)],
)
def test_one_tokens_attention(heads, kv_heads, dim, width, at, dtype):
    from meshwise.parallel import token_kernels

    tokens = at + 30
    q = randn(2, 1, heads, dim, dtype=dtype)
    keys, values = (randn(2, tokens, kv_heads, d, dtype=dtype) for d in (dim, width))
    keys[:, at + 1 :], values[:, at + 1 :] = torch.nan, torch.nan  # nothing has written them
    position = torch.tensor([at], device="cuda")
    found = token_kernels.attend(q, keys, values, position, tokens)
    seen_k, seen_v = (
        x[:, : at + 1].double().repeat_interleave(heads // kv_heads, 2) for x in (keys, values)
    )
    scores = torch.einsum("bhd,bthd->bht", q[:, 0].double(), seen_k) / dim**0.5
    wanted = torch.einsum("bht,bthd->bhd", scores.softmax(-1), seen_v)
    torch.testing.assert_close(
        found[:, 0].double(), wanted, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
    )


def expected(name, prompts):
    """Each token from a forward pass of the plain module over everything before it."""
    with torch.device("meta"):
        module = build(on_cpu.MODELS[name])
    module.to_empty(device="cuda")
    with on_cpu.strong_weights():
        module.init_weights(on_cpu.SEED)
    tokens = prompts
    with torch.no_grad():
        for _ in range(on_cpu.NEW):
            following = module(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], -1)
    return tokens[:, on_cpu.PROMPT :]


@pytest.mark.parametrize("lowering", ["eager", "compiled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["gpt", "llama", "tied", "latent"])
def test_tokens_of_a_graph_are_those_of_the_plain_module(one_rank, name, rows, lowering):
    torch.compiler.reset()
    plan_of = functools.partial(_plan, lowering=lowering)
    layout = Layout(microbatch_size=rows)
    request = on_cpu.request_of(plan_of, name, layout, batch=rows)
    plan = decode.plan_for(request)
    place = mesh.build(plan.layout, "cuda")
    with on_cpu.strong_weights():
        ready = greedy.prepare(
            plan, place, one_rank.device, new_tokens=request.counts.new_tokens,
            seed=request.asked.seed, shortest=8,
        )  # fmt: skip
    prompts = decode.prompts_of(plan, 0, request.asked.seed).to(one_rank.device)
    found = greedy.generate(ready, prompts, lambda: None, lambda mark: None).tokens
    assert torch.equal(found.flatten(0, 1), expected(name, prompts.flatten(0, 1)))
