"""The Hopper kernels in the interpreter, with race detection, and their lowering for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KINDS, make_case, pairwise, slow_softmax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.mosaic.gpu import core
from lossless import poison, prompts_of
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax import step as steps
from ddtree_jax.pallas.tree_attention import (
    Config,
    best_config,
    make_plan,
    padded_attention,
    plan_if_supported,
    shared_memory,
    tree_attention,
)
from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference
from ddtree_jax.tree import chain

SIZES = (1, 2, 7, 8, 9, 17, 31, 32, 33, 63, 64, 65, 128)


def rounded(case):
    """The arguments in bf16, and the case with their values."""
    values = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in case.arguments[:3]]
    arguments = [jnp.asarray(x, jnp.bfloat16) for x in values] + list(case.arguments[3:])
    return arguments, type(case)(*values, *case.arguments[3:], case.lines)


def agrees(case, value_size, config, max_rows=None, scale=0.1, attention=tree_attention):
    """The kernels' results are the reference's and a float64 softmax's, without races."""
    arguments, case = rounded(case)
    keywords = dict(scale=scale, value_size=value_size, max_rows=max_rows)
    found = attention(*arguments, **keywords, config=config, interpret=True)
    assert not interpret_pallas_call.get_races().races_found
    reference = tree_attention_reference(*map(jnp.asarray, case.arguments), **keywords)
    for out, lse in (slow_softmax(case, scale, value_size), reference):
        error = np.asarray(found[0], np.float64) - out
        assert np.linalg.norm(error) <= 4e-3 * np.linalg.norm(out)
        assert np.abs(error).max() <= 1.2e-2 * np.abs(out).max()
        np.testing.assert_allclose(found[1], lse, rtol=0, atol=2e-5)
    unseen = np.isinf(reference[1])
    assert (np.asarray(found[0])[unseen] == 0).all()
    return found


def few(gangs: int, heads: int, width: int, **options) -> Config:
    """A config of a small device, so that short prefixes are divided too."""
    tiles = -(-width * heads // 64)
    return Config(multiprocessors=gangs * tiles, least_share=1, **options)


FAST = [  # sizes, prefixes, kind, heads, latent, value, gangs, options
    ((2,), (130,), "chain", 64, 576, 512, 2, {}),
    ((1, 1), (200, 0), "chain", 64, 192, 128, 1, {}),
    ((9, 3), (64, 63), "best-first", 8, 192, 128, 3, {}),
    ((33,), (1,), "comb", 8, 128, 128, 2, dict(stages=3)),
    ((5, 1), (70, 3), "star", 16, 320, 192, 2, {}),
]


@pytest.mark.parametrize(
    "sizes,prefixes,kind,heads,d,value,gangs,options",
    [FAST[2], *(pytest.param(*case, marks=pytest.mark.slow) for case in FAST[:2] + FAST[3:])],
)
def test_interpreted(sizes, prefixes, kind, heads, d, value, gangs, options):
    rng = np.random.default_rng([*sizes, heads])
    case = make_case(rng, sizes, prefixes, max(sizes), kind, heads, d)
    agrees(case, value, few(gangs, heads, max(sizes), **options))


def test_padding_and_rows_of_nobody():
    """NaN there reaches nothing, and the results are zeros."""
    case = make_case(
        np.random.default_rng(0), (2, 5), (66, 0), 8, "random", 32, 192, padding=1, spare=3
    )
    found = agrees(case, 128, few(2, 32, 6), max_rows=6)
    assert np.isfinite(found[0]).all() and (found[0][-3:] == 0).all()


@pytest.mark.parametrize("heads", (4, *(pytest.param(h, marks=pytest.mark.slow) for h in (1, 11))))
def test_other_heads_are_padded(heads):
    """What a device has of 64 heads on 16, 64 and 6; by the plan that verify makes for them."""
    case = make_case(np.random.default_rng(heads), (9, 3), (64, 63), 9, "best-first", heads, 192)
    (_, _, pool, _, *place), _ = rounded(case)
    sizes = dict(value_size=128, max_rows=9)
    plan = plan_if_supported(pool, *place, heads=heads, **sizes)
    attention = partial(padded_attention, plan=plan)
    out, lse = agrees(case, 128, best_config(heads, 9), 9, attention=attention)
    assert out.shape == (12, heads, 128) and lse.shape == (12, heads)


VARIANTS = [
    (192, 128, {}),
    (192, 128, dict(merge_together=2)),
    (128, 128, dict(stages=3)),
    (320, 192, dict(merge_together=1)),
    (576, 512, {}),
    (256, 192, dict(stages=4)),
]


def cover():
    """Sizes, prefixes, tree kinds, variants and a second request, any two of them together."""
    prefixes, others = (0, 1, 63, 64, 65), (None, 1, 5)
    rng = np.random.default_rng(0)
    return pairwise(rng, SIZES, prefixes, KINDS, range(len(VARIANTS)), others)


@pytest.mark.slow
@pytest.mark.parametrize("size,prefix,kind,variant,other", cover())
def test_pairwise(size, prefix, kind, variant, other):
    d, value, options = VARIANTS[variant]
    heads = 64 if size <= 9 else 8
    sizes = (size,) if other is None else (size, other)
    prefixes = (prefix, 70)[: len(sizes)]
    rng = np.random.default_rng([size, prefix, variant])
    case = make_case(rng, sizes, prefixes, max(sizes), kind, heads, d)
    agrees(case, value, few(2, heads, max(sizes), **options))


def blocks_by_gang(plan, gangs):
    """What every gang does, as (request, block), by the kernel's own arithmetic."""
    requests, share = np.asarray(plan.requests), int(plan.share[0])
    work = []
    for gang in range(gangs):
        mine = []
        for r in range(*np.asarray(plan.gangs)[gang]):
            low = max(gang * share, requests[r, 0])
            high = min((gang + 1) * share, requests[r, 1])
            mine += [(r, b - requests[r, 0]) for b in range(low, high)]
        work.append(mine)
    return work


@pytest.mark.parametrize("requests,width,longest", [
    (1, 1, 262_144), (1, 9, 8192), (3, 128, 70), (32, 17, 8192), (128, 33, 2048), (128, 1, 3),
    (7, 64, 0),
])  # fmt: skip
def test_plan_divides_all_blocks_evenly(requests, width, longest):
    rng = np.random.default_rng([requests, width])
    lengths = rng.integers(0, longest + 1, requests).astype(np.int32)
    lengths[0] = longest
    rows = rng.integers(0, width + 1, requests)
    rows[0] = width
    row_start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    ancestors = jnp.ones((int(row_start[-1]), -(-width // 32)), jnp.uint32)
    pages = max(1, -(-longest // 64))
    plan = make_plan(
        jnp.asarray(lengths), jnp.asarray(row_start), ancestors, heads=64, pages=pages,
        max_rows=width,
    )  # fmt: skip
    work = blocks_by_gang(plan, plan.gangs.shape[0])
    wanted = [
        (r, b)
        for r in range(requests)
        if rows[r]
        for b in range(-(-lengths[r] // 64) + -(-int(rows[r]) // 64))
    ]
    assert [block for mine in work for block in mine] == wanted
    equal = max(-(-len(wanted) // len(work)), Config().least_share)
    assert max(map(len, work)) <= equal + -(-equal // 8)
    assert len({r for mine in work for r, _ in mine}) == (rows > 0).sum()


@pytest.mark.parametrize("requests,context,width,heads,share,several", [
    (128, 2048, 1, 64, 33, 0),  # a request each: nothing to merge
    (32, 8192, 1, 64, 33, 32),  # four gangs each, none of which goes on to another request
    (32, 8192, 9, 64, 295, 13),  # of 14 gangs: requests cannot begin with one
    (1, 8192, 1, 64, 4, 1),
])  # fmt: skip
def test_gangs_begin_with_a_request_where_that_is_cheap(
    requests, context, width, heads, share, several
):
    plan = make_plan(
        jnp.full(requests, context), jnp.arange(requests + 1) * width,
        jnp.ones((requests * width, 1), jnp.uint32), heads=heads, pages=context // 64,
        max_rows=width,
    )  # fmt: skip
    assert int(plan.share[0]) == share and int(plan.divided[-1]) == several
    if share == 33:
        assert {len({r for r, _ in mine}) for mine in blocks_by_gang(plan, 132)} == {0, 1}


WIDTHS = (1, 9, 17, 33)
MEASURED = ((1, 8192), (1, 32768), (8, 8192), (32, 2048), (32, 8192), (128, 2048))
SHAPES = [  # requests, context, width, heads: those benchmarks/tree_attention.py measures, and ends
    *((r, s, n, 64) for r, s in MEASURED for n in WIDTHS),
    *((r, 8192, n, 8) for r in (1, 32) for n in WIDTHS),
    (1, 262_144, 128, 64), (128, 2048, 128, 8), (3, 1000, 65, 16), (2, 64, 7, 32),
]  # fmt: skip
BY_DEFAULT = [(32, 8192, 17, 8), (1, 262_144, 128, 64)]  # the others differ in array sizes


def lowered(requests, context, width, heads, d=576, value=512, layers=61, **options):
    """The two Mosaic calls of one shape, as text."""
    shape, bf16, i32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32
    m, pages = requests * width, -(-context // 64)

    def attend(*arguments):
        config = Config(**options) if options else None
        return tree_attention(
            *arguments, scale=0.1, value_size=value, max_rows=width, config=config
        )

    traced = jax.jit(attend).trace(
        shape((m, heads, d), bf16), shape((m, d), bf16),
        shape((layers, requests * pages, 64, d), bf16), shape((), i32),
        shape((requests, pages), i32), shape((requests,), i32), shape((requests + 1,), i32),
        shape((m, -(-width // 32)), jnp.uint32),
    )  # fmt: skip
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    return text.count("@mosaic_gpu_v2")


@pytest.mark.parametrize("requests,context,width,heads", BY_DEFAULT)
def test_lowers_for_cuda(requests, context, width, heads):
    """Pools of 61 layers, some of more than 2^31 elements."""
    assert calls(lowered(requests, context, width, heads)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("requests,context,width,heads", [s for s in SHAPES if s not in BY_DEFAULT])
def test_lowers_for_cuda_in_all_shapes(requests, context, width, heads):
    assert calls(lowered(requests, context, width, heads)) == 2


@pytest.mark.parametrize("d,value,options", [
    (576, 512, dict(merge_together=16)), (192, 192, dict(stages=5)),
])  # fmt: skip
def test_shared_memory_is_what_the_lowering_takes(monkeypatch, d, value, options):
    taken, measure = [], core._smem_tree_size

    def watch(buffers):
        taken.append(measure(buffers))
        return taken[-1]

    monkeypatch.setattr(core, "_smem_tree_size", watch)
    lowered(2, 130, 3, 64, d, value, 3, **options)
    assert shared_memory(d, value, Config(**options)) in taken


def wired_model(heads=8):
    """A tiny model in bf16 of a shape the kernels serve."""
    return tiny_model("bfloat16", num_attention_heads=heads, kv_lora_rank=128, qk_rope_head_dim=64)


@pytest.mark.parametrize("served", (8, 4, None))
def test_steps_use_the_kernels_where_they_can(served):
    """Lowered for CUDA: two calls for all layers, with padded heads too; none in float32."""
    model = wired_model(served) if served else tiny_model()
    state = dd.prefill(model, prompts_of((5, 40)), max_new_tokens=8)
    step = jax.jit(partial(dd.ddtree_step, speculation=dd.Speculation(10, 3)))
    text = step.trace(model.weights, state).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == (2 if served else 0)
    assert calls(step.lower(model.weights, state).as_text()) == 0  # on the CPU at hand


@pytest.mark.slow
def test_verify_through_the_kernels(monkeypatch):
    """Logits of a whole pass, interpreted, are those of the reference path but for rounding."""
    model = wired_model()
    state = poison(dd.prefill(model, prompts_of((5, 70)), max_new_tokens=8))
    coming = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)
    tree = chain(coming[:, 0], coming[:, 1:], jnp.array([5, 2]), state.active)

    def through(*rows, scale, value_size, max_rows):
        *rows, _ = rows
        return tree_attention(
            *rows, scale=scale, value_size=value_size, max_rows=max_rows,
            config=few(2, 8, max_rows), interpret=True,
        )[0]  # fmt: skip

    wanted, _ = steps.verify(model.weights.target_module(), state, tree, ())
    monkeypatch.setattr(steps, "attend", through)
    found, _ = steps.verify(model.weights.target_module(), state, tree, ())
    for r, size in enumerate(tree.size.tolist()):
        a, b = (np.asarray(x[r, :size], np.float32) for x in (found, wanted))
        assert np.isfinite(a).all() and np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


def arguments(m=4, heads=8, d=192, page=64, requests=2, dtype=jnp.bfloat16, width=4):
    return [
        jnp.zeros((m, heads, d), dtype), jnp.zeros((m, d), dtype),
        jnp.zeros((2, 5, page, d), dtype), 1, jnp.zeros((requests, 2), jnp.int32),
        np.zeros(requests, np.int32), jnp.arange(requests + 1, dtype=jnp.int32),
        jnp.zeros((m, -(-width // 32)), jnp.uint32),
    ]  # fmt: skip


@pytest.mark.parametrize("made,keywords,match", [
    (dict(dtype=jnp.float32), {}, "bfloat16 only"),
    (dict(heads=12), {}, "12 heads: the kernel supports 8, 16, 32, 64"),
    (dict(page=32), {}, "pages of 32 tokens: the kernel supports 64"),
    (dict(d=200), {}, "latents of 200 elements"),
    ({}, dict(value_size=100), "value_size=100"),
    ({}, dict(value_size=256), "value_size=256"),
    ({}, dict(max_rows=5), "max_rows=5: must be from 1 to 4"),
    ({}, dict(scale=0.0), "scale=0.0: must be positive"),
    (dict(d=576), dict(config=Config(stages=3)), "shared memory"),
])  # fmt: skip
def test_refuses_what_it_cannot_do(made, keywords, match):
    with pytest.raises(ValueError, match=match):
        tree_attention(*arguments(**made), **dict(scale=1.0, value_size=128) | keywords)


@pytest.mark.parametrize("place,value,match", [
    (3, 2, "layer=2: the pool has 2"),
    (5, np.array([-1, 3], np.int32), "lengths from -1 to 3"),
    (5, np.array([0, 129], np.int32), "block tables hold 0 to 128"),
    (6, jnp.zeros(2, jnp.int32), "row_start"),
    (1, jnp.zeros((4, 128), jnp.bfloat16), "do not fit"),
])  # fmt: skip
def test_refuses_inconsistent_arguments(place, value, match):
    given = arguments()
    given[place] = value
    with pytest.raises(ValueError, match=match):
        tree_attention(*given, scale=1.0, value_size=128)


@pytest.mark.parametrize("name,value", [
    ("stages", 1), ("least_share", 0), ("merge_together", 2.0),
    ("multiprocessors", True),
])  # fmt: skip
def test_refuses_a_wrong_config(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Config(**{name: value})
