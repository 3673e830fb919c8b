"""The sweep on a tiny model, and the README's tables from small result files."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless import prompts_of
from tiny import tiny_model

import ddtree_jax as dd
from benchmarks import (
    acceptance,
    ahead,
    ceilings,
    results_file,
    sampling,
    static_batch,
    sweep,
    tables,
    tree_attention,
)

METHODS = ("autoregressive", "dflash", "ddtree")
CASE = {"context": "short", "mix": "code", "temperature": 1.0}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield tiny_model("float64")


@pytest.fixture
def tiny_sweep(monkeypatch, float64):
    """Runs the script on the tiny model with token prompts; returns the result file."""
    monkeypatch.setattr(sweep, "load_model", lambda *_, **__: float64)
    monkeypatch.setattr(
        sweep.held_out, "load", lambda mix, count: prompts_of((len(mix), 63))[:count]
    )

    def run(path, *options):
        fixed = ("--new-tokens", "8", "--prompts", "2", "--repeats", "2", "--settings", "8x4")
        sweep.main([*fixed, "--output", str(path), *options])
        return json.loads(path.read_text())

    return run


def test_cut_is_a_prefill_of_its_own(float64):
    """Whatever the place in the pool; and the pool survives the donation of a whole copy."""
    prompts = prompts_of((5, 63))
    pool = static_batch.make_pool(float64, prompts, 2, 8, CASE)
    alone = dd.prefill(float64, prompts[1:], dd.Sampling(1.0, seed=1), 8)
    one = static_batch.cut(pool.state, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, one, alone)
    method = static_batch.Method("ddtree", dd.Speculation(), float64.weights)
    static_batch.decode(
        float64.weights, static_batch.cut(pool.state, 0, 2), method, static_batch.FOREVER
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pool.state))
    assert pool.state.passes.tolist() == [0, 0]


def test_points_are_what_generate_gives(float64):
    """The second prompt being the first again, with another seed."""
    prompts = prompts_of((63,))
    pool = static_batch.make_pool(float64, prompts, 2, 8, CASE)
    methods = static_batch.make_methods(float64, METHODS, [(8, 4)])
    assert list(methods) == [("autoregressive", 0, 1), ("dflash", 7, 1), ("ddtree", 8, 4)]
    samplings = [dd.Sampling(1.0, seed=seed) for seed in range(2)]
    for point in static_batch.measure(float64, pool, 2, methods, 1, 1, static_batch.Clock()):
        done = dd.generate(
            float64, prompts * 2, point["method"], sampling=samplings, max_new_tokens=8
        )
        committed = sum(len(c.tokens) - 1 for c in done)
        passes = [c.verify_passes for c in done]
        assert point["tokens"] == committed and point["differ"] == 0
        assert point["passes"] == max(passes) and point["groups"] == 1
        assert point["accept_length"] == pytest.approx(committed / sum(passes))
        assert point["tokens_per_second"] == pytest.approx(committed / point["seconds"])
        assert point["step_ms"] == pytest.approx(1e3 * point["seconds"] / max(passes))
        assert point["prompt_tokens"] == 63


def test_differing_tokens_are_counted(float64, monkeypatch):
    pool = static_batch.make_pool(float64, prompts_of((5, 63)), 2, 8, CASE)
    methods = static_batch.make_methods(float64, METHODS[:2], [])
    original = static_batch.decode

    def decode(weights, state, method, passes):
        state, running = original(weights, state, method, passes)
        if method.method == "dflash":
            state = static_batch.replace(state, tokens=state.tokens.at[1, 3].add(1))
        return state, running

    monkeypatch.setattr(static_batch, "decode", decode)
    points = static_batch.measure(float64, pool, 2, methods, 2, 1, static_batch.Clock())
    assert [(p["method"], p["differ"]) for p in points] == [("autoregressive", 0), ("dflash", 1)]


@pytest.mark.slow
def test_script(tiny_sweep, tmp_path, capsys):
    """All points, their fields, the summary, the plot; then --append replaces and adds."""
    path = tmp_path / "sweep.json"
    result = tiny_sweep(path, "--concurrency", "1,2", "--plot")
    points, summary = result["points"], result["summary"]
    assert len(points) == 2 * 2 * 3 and path.with_suffix(".png").stat().st_size > 0
    needed = {"source", "requests", "context", "mix", "method", "budget", "top_k",
              "accept_length", "step_ms", "tokens_per_second"}  # fmt: skip
    assert all(needed <= set(p) and p["differ"] == 0 and p["tokens"] == 14 for p in points)
    assert [p["groups"] for p in points if p["mix"] == "code"] == [2] * 3 + [1] * 3
    assert summary["requests_compared"] == 16 and summary["requests_differ"] == 0
    code = {p["method"]: p for p in points[6:9]}
    assert summary["chain_c2_code"] == pytest.approx(code["dflash"]["tokens_per_second"])
    assert summary["ddtree_b8_k4_over_ar_c2_code"] == pytest.approx(
        code["ddtree"]["tokens_per_second"] / code["autoregressive"]["tokens_per_second"]
    )
    assert {"chain_over_ar_c1", "ar_c2", "ar_c1_prose"} <= set(summary)
    assert any("CPU" in note for note in result["notes"])
    assert capsys.readouterr().out == tables.render("sweep", tmp_path)

    options = ("--append", "--json", "--concurrency", "2", "--methods", "ddtree")
    again = tiny_sweep(path, *options, "--temperature", "0,1")
    assert len(again["points"]) == 12 + 2
    assert json.loads(capsys.readouterr().out) == again["summary"]
    assert "ddtree_b8_k4_c2_t1" in again["summary"]
    assert again["points"][:4] == points[:4]


def test_time_limit(tiny_sweep, tmp_path, monkeypatch):
    """What would not fit is named and not run; what came before it is kept."""
    monkeypatch.setattr(
        static_batch.Clock,
        "fits",
        lambda clock, programs: programs <= clock.programs or not clock.running,
    )
    result = tiny_sweep(tmp_path / "sweep.json", "--concurrency", "1,2", "--methods", "ddtree",
                        "--workers", "1")  # fmt: skip
    assert {p["requests"] for p in result["points"]} == {1}
    named = "code, short, greedy, 2 requests; prose, short, greedy, 2 requests"
    assert result["notes"][-1].endswith(named)


def test_clock():
    clock = static_batch.Clock(budget=100.0, compilation=30.0, running=5.0, programs={1})
    assert clock.fits({1}) and clock.fits({1, 2, 3, 4})
    clock.start -= 70.0
    assert clock.fits({1}) and not clock.fits({1, 2})
    assert static_batch.Clock(budget=None, compilation=1e9).fits({1})


def test_append_refuses_another_machine(tiny_sweep, tmp_path):
    path = tmp_path / "sweep.json"
    machine = {"device": "NVIDIA H200"}
    path.write_text(json.dumps({"machine": machine, "versions": {}, "points": []}))
    with pytest.raises(ValueError, match="H200"):
        tiny_sweep(path, "--append")


@pytest.fixture
def results(tmp_path):
    """Small result files of both scripts."""
    names = ("chain", "ddtree_b7_k4", "ddtree_b8_k4", "ddtree_b16_k8", "ddtree_b32_k8")
    summary = {
        f"{name}_{t}_{mix}": i + (t == "t1") / 10 + (mix == "prose") / 100
        for i, name in enumerate(names, 1)
        for t in ("greedy", "t1")
        for mix in ("code", "prose")
    }
    points = [
        {"method": "ddtree", "temperature": t, "mix": f"code_{size}", "budget": b, "top_k": k,
         "accept_length": b / k + (size == "long") + 10 * t}
        for b in (4, 16) for k in (1, 2) for size in ("short", "long") for t in (0.0, 1.0)
    ]  # fmt: skip
    results_file.write(tmp_path / "acceptance.json", summary, points, [])
    shared = {"mix": "code", "context": "short", "temperature": 0.0}
    speeds = [(1, "autoregressive", 0, 1, 1000.0), (1, "ddtree", 8, 4, 1500.4),
              (32, "ddtree", 8, 4, 9000.0)]  # fmt: skip
    points = [
        {**shared, "requests": c, "method": m, "budget": b, "top_k": k, "tokens_per_second": s}
        for c, m, b, k, s in speeds
    ]
    results_file.write(tmp_path / "sweep.json", {}, points, [])
    results_file.write(tmp_path / "sampling.json", {}, rule_points(), [])
    variants = ("scores as they are", "fitted by depth", "without the noise")
    points = [
        {"variant": v, "budget": b, "top_k": 8, "accept_length": i + b / 10}
        for i, v in enumerate(variants) for b in (8, 16)
    ]  # fmt: skip
    layers = [
        {"expert_width": 2048, "routing": "uniform", "rows": 9, "distinct_experts": 66.8,
         "us": 1460.8, "limit_us": 1168.3, "share": 0.7998, "tflops": 13.8}
    ]  # fmt: skip
    results_file.write(tmp_path / "expert_matmul.json", {}, layers, [])
    calls = [
        {"heads": heads, "requests": 32, "context": 8192, "width": n, "us": us, "share": 0.6949}
        for heads, n, us in ((8, 1, 90.02), (64, 1, 96.87), (64, 9, 1605.1))
    ]
    results_file.write(tmp_path / "tree_attention.json", {}, calls, [])
    summary = {"scale_depth_1": 1.0, "scale_depth_2": 0.7}
    results_file.write(tmp_path / "calibration.json", summary, points, [])
    return tmp_path


def test_the_check_decodes_the_chain_of_the_model(monkeypatch):
    """Whatever the drafter's horizon; each decoding is compared with the replay of its budget."""
    asked = []

    def replay(trace, budget, top_k):
        asked.append((budget, top_k))
        return SimpleNamespace(passes=[budget, 99])

    def generate(model, texts, method, speculation, samplings, new_tokens):
        assert (speculation.budget, speculation.top_k) == asked[-1]
        assert (method == "dflash") == (speculation.top_k == 1)
        return [SimpleNamespace(tokens=[7], verify_passes=speculation.budget) for _ in texts]

    monkeypatch.setattr(acceptance, "replay", replay)
    monkeypatch.setattr(acceptance, "generate", generate)
    model = SimpleNamespace(drafter_config=SimpleNamespace(horizon=4))
    trace = SimpleNamespace(said=np.array([[7, 0], [7, 0]]), count=[1, 1])
    args = SimpleNamespace(checks=2, new_tokens=1)
    found = acceptance.check(model, ["a", "b", "c"], [dd.Sampling()] * 3, trace, args)
    assert asked == [(4, 1), (8, 4), (16, 8)]
    assert found == {"prompts": 6, "differ": 3}


def rule_points():
    """Each rule commits 3 tokens a pass: 2 on short prompts, 4 on long ones."""
    return [
        {"part": "rules", "mix": f"{kind}_{size}", "law": law, "rule": rule, "method": method,
         "budget": budget, "top_k": 8, "tokens": 10 * (1 + (size == "long")), "passes": 5}
        for kind in ("code", "prose") for size in ("short", "long") for law in sampling.LAWS
        for rule, method in (("coupled", "ddtree"), ("rejection", "ddtree"),
                             ("coupled chain", "dflash"), ("sampled chain", "dflash"))
        for budget in (sampling.BUDGETS if method == "ddtree" else (7,))
    ]  # fmt: skip


def test_committed_sampling_figures():
    """The file holds every mix, law, rule and budget, its summary is its points', and the gates."""
    found = json.loads((results_file.RESULTS / "sampling.json").read_text())
    points, summary = found["points"], found["summary"]
    here = [p for p in points if p["part"] == "rules"]
    assert {(p["mix"], p["law"], p["rule"], p["budget"]) for p in here} == {
        (p["mix"], p["law"], p["rule"], p["budget"]) for p in rule_points()
    }
    timed = [p for p in points if p["part"] == "filters"]
    assert summary == sampling.summarise(here, timed)
    assert summary["coupled_t1_b16"] >= 2.0
    assert summary["filter_us_9_rows"] <= 80 and summary["filter_us_1152_rows"] <= 1000
    for kind in ("code", "prose"):  # what the README says of trees and chains of equal cost
        coupled, drawn, chain = (
            sampling.mean(here, kind, rule, "t1", 7)
            for rule in ("coupled", "rejection", "sampled chain")
        )
        assert 1.13 <= coupled / chain <= 1.15
        assert (drawn < chain) == (kind == "prose")


def test_sampling_keeps_the_part_it_does_not_run(monkeypatch, tmp_path):
    """And its table takes the mean over passes of the short and the long mix."""
    points = rule_points()
    monkeypatch.setattr(sampling, "VOCAB", 512)
    monkeypatch.setattr(sampling, "accept_lengths", lambda args: points)
    at = ["--output", str(tmp_path / "sampling.json")]
    sampling.main(["--parts", "filters", "--rows", "2", *at])
    sampling.main(["--parts", "rules", "--plot", *at])
    result = json.loads((tmp_path / "sampling.json").read_text())
    parts = [p["part"] for p in result["points"]]
    assert parts == ["rules"] * len(points) + 2 * ["filters"]
    assert all(p["device"] == "cpu" for p in result["points"])
    summary = result["summary"]
    assert summary["coupled_t1_b16"] == 3
    assert {"filter_us_2_rows", "filter_us_2_rows_deep"} <= set(summary)
    assert (tmp_path / "sampling.png").exists()
    table = tables.render("sampling", tmp_path).splitlines()
    assert table[0] == "| mix | law | rule | chain | tree 7/8 | tree 8/8 | tree 16/8 | tree 32/8 |"
    assert table[2] == "| code | T = 0.6 | coupled | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 |"
    assert len(table) == 2 + 2 * 3 * 2


def test_tables(results, capsys):
    assert tables.main(["--results", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "| code | T = 1 | 1.10 | 2.10 | 3.10 | 4.10 | 5.10 |" in printed
    assert "| code | 16 | 16.50 | 8.50 |" in printed
    assert "| scaled by a fitted b (1, 0.7) | 1.80 | 2.60 |" in printed
    assert "| 2048, uniform | 9 | 67 | 1,461 | 1,168 | 0.80 | 14 |" in printed
    assert "| 64 | 32 | 8,192 | 97 (0.69) | 1,605 (0.69) |" in printed
    assert "| 8 | 32 | 8,192 | 90 (0.69) | - |" in printed
    assert printed.endswith(
        "<!-- table: sweep -->\n"
        "| prompts | requests | plain | tree 8/4 |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| code, short, greedy | 1 | 1,000 | 1,500 (1.50x) |\n"
        "| code, short, greedy | 32 | - | 9,000 |\n"
        "<!-- end -->\n\n"
    )


@pytest.mark.parametrize("page", ("README.md", "docs/sampling.md", "docs/experts.md"))
def test_pages_show_the_committed_results(page):
    assert tables.main(["--check", str(results_file.RESULTS.parents[1] / page)]) == 0


def test_tables_of_a_page(results, tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("# A\n<!-- table: sweep -->\nold\n<!-- end -->\nrest\n")
    at = ["--results", str(results)]
    assert tables.main(["--check", str(page), *at]) == 1
    assert "sweep" in capsys.readouterr().err and "old" in page.read_text()
    assert tables.main(["--write", str(page), *at]) == 0
    text = page.read_text()
    assert (
        text == f"# A\n<!-- table: sweep -->\n{tables.render('sweep', results)}<!-- end -->\nrest\n"
    )
    assert tables.main(["--check", str(page), *at]) == 0
    assert tables.main(["--write", str(page), *at]) == 0 and page.read_text() == text


@pytest.mark.parametrize(
    "text", ("no table", "<!-- table: speed -->\n<!-- end -->", "<!-- table: sweep -->\n| a |\n")
)
def test_pages_that_cannot_be_checked(results, tmp_path, capsys, text):
    page = tmp_path / "README.md"
    page.write_text(text)
    assert tables.main(["--check", str(page), "--results", str(results)]) == 2
    assert capsys.readouterr().err.startswith("tables: error: ")


def test_missing_results(tmp_path, capsys):
    assert tables.main(["--results", str(tmp_path)]) == 2
    assert "python -m benchmarks.acceptance" in capsys.readouterr().err


def test_attention_limits_are_the_reference_tables():
    """A few of the floors that the peers were measured against, in microseconds."""
    for shape, us in (((1, 8192, 9), 13.1), ((32, 2048, 17), 199.3), ((32, 8192, 9, 8), 68.4)):
        assert tree_attention.Point(*shape).limit_us == pytest.approx(us, rel=0.01)


def test_attention_trees_are_trees():
    """Ancestor words of random trees: the root in every line, a child's line its parent's + 1."""
    words = tree_attention.random_words(np.random.default_rng(0), 3, 40).reshape(3, 40, -1)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    seen = bits.reshape(3, 40, -1)[..., :40].astype(bool)
    assert seen[:, :, 0].all() and seen[:, np.arange(40), np.arange(40)].all()
    assert not np.triu(seen, 1).any() and seen.sum(-1).max() <= 8
    for tree in seen:
        for i in range(1, 40):
            parent = np.flatnonzero(tree[i])[-2]
            assert (tree[i] == tree[parent] | (np.arange(40) == i)).all()
    assert (seen[0] != seen[1]).any()


def test_attention_summary_has_the_named_figures():
    found = [
        {"requests": p.requests, "context": p.context, "width": p.width, "heads": p.heads,
         "us": 2 * p.limit_us, "share": 0.5}
        for p in tree_attention.ALL
    ]  # fmt: skip
    summary = tree_attention.summarize(found, 0.01)
    assert summary["share_geomean"] == pytest.approx(0.5) and summary["share_n1_min"] == 0.5
    assert all(value is not None for value in summary.values())
    assert tree_attention.summarize([], None)["share_min"] is None


def test_attention_program_is_attention_only(monkeypatch):
    """Two Mosaic calls a layer, one traced body, the plan outside."""
    monkeypatch.setattr(tree_attention, "L2", 1 << 16)
    monkeypatch.setattr(tree_attention, "CALLS", (3, 3))
    point, config = tree_attention.Point(2, 128, 9, 8), tree_attention.Config()
    made = tree_attention.inputs(point)
    plan = tree_attention.planner(point, config)(*made)
    run = tree_attention.program(point, config, True)
    text = run.trace(plan, *made).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2 and text.count("call @_run") == 3


def test_programs_compiled_ahead(monkeypatch, tmp_path):
    """Loaded they give what they gave; a missing one and other sources are named."""
    run, x = jax.jit(lambda x: jnp.sin(x).sum(axis=0)), jnp.arange(12.0).reshape(3, 4)
    ahead.save(tmp_path, "sines", ahead.build(run, (x,), "sines"))
    loaded = ahead.build(run, (x,), "sines", tmp_path)
    np.testing.assert_array_equal(loaded(x), run(x))
    with pytest.raises(FileNotFoundError, match="cosines.xz: compile it ahead"):
        ahead.build(run, (x,), "cosines", tmp_path)
    other = ahead.made_with() | {"sources": "others"}
    monkeypatch.setattr(ahead, "made_with", lambda: other)
    with pytest.raises(ValueError, match="sines.xz: made with .* here are .*'sources': 'others'"):
        ahead.build(run, (x,), "sines", tmp_path)


def test_attention_below_the_limit_is_an_error():
    """XLA makes one of two calls that are alike: such a figure must not come out."""
    point = tree_attention.Point(1, 8192, 9)
    timed = tree_attention.Timed(point, tree_attention.Config(), None, (), 1)
    with pytest.raises(RuntimeError, match="below the limit"):
        tree_attention.as_point(timed, [point.limit_us / 2], 0.0)


@pytest.mark.parametrize("stage", ("check", pytest.param("all", marks=pytest.mark.slow)))
def test_attention_benchmark_runs(monkeypatch, tmp_path, stage, capsys):
    """Every stage on tiny points, the reference in the kernels' place."""

    def stand_in(*arguments, config, plan, masked, **keywords):
        return tree_attention.tree_attention_reference(*arguments, **keywords)

    bench, small = tree_attention, [tree_attention.Point(1, 64, n, 8) for n in (1, 9)]
    monkeypatch.setattr(bench, "tree_attention", stand_in)
    monkeypatch.setattr(bench, "L2", 1 << 16)
    monkeypatch.setattr(bench, "CALLS", (1, 1))
    monkeypatch.setattr(ceilings, "measure", lambda: {"read_tb_s": 4.5})
    monkeypatch.setattr(bench.Timed, "sample", lambda self: 10.0 * self.config.stages)
    monkeypatch.setattr(bench, "CONFIGS", [bench.Config(stages=3), bench.Config()])
    for name, points in (("ALL", small), ("SCREENED", small), ("CHECKED", small[:1])):
        monkeypatch.setattr(bench, name, points)
    monkeypatch.setattr(bench, "MASK", small[1])
    path = tmp_path / "attention.json"
    bench.main(["--stage", stage, "--output", str(path), "--workers", "1"])
    assert "20.0 us" in capsys.readouterr().out
    assert path.exists() == (stage == "all")
    if stage == "all":
        result = json.loads(path.read_text())
        assert [p["us"] for p in result["points"]] == [20.0, 20.0]
        assert {"requests", "context", "width", "heads", "us", "max_rel_error"} <= set(
            result["points"][0]
        )
        assert result["points"][1]["max_rel_error"] < 1e-2
        assert result["summary"]["mask_cost"] == 0
        assert result["machine"]["ceilings_after"] == {"read_tb_s": 4.5}


def test_attention_benchmark_keeps_to_its_time():
    """Once enough, no config is tried: nothing is chosen, and the log says so."""
    log = []
    found = tree_attention.choose([], 1, lambda *line: log.append(line), lambda: True)
    assert found == {} and log[0][0] == tree_attention.SCREENED[0]
