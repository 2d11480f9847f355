"""Options: one record a verb, the same for the command line, Python and the ranks."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import options
from meshwise.models import catalogue
from meshwise.options import measure, plan, refit, ring, run
from meshwise.spec import Layout

RECORDS = [
    run.Suite, refit.RefitOptions, refit.Training, refit.Inference, refit.ModelSizes,
    ring.RingOptions, ring.Pattern,
    plan.PlanOptions, *measure.KINDS.values(),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_option_has_a_help_and_a_flag_of_its_own(record):
    names = [one.name for one in dataclasses.fields(record)]
    assert options.helps(record).keys() == set(names)
    flags = [rule.name for rule in options.rules(record).values() if rule.name]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("what", measure.KINDS)
def test_every_option_of_a_kind_is_read_where_its_cases_are_listed(what):
    module = importlib.import_module(f"meshwise.probe.cases.{what}")
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "asked"
    }
    elsewhere = {"dtype", "efa", "max_fail_retry"}  # the scope has it; of the sweep
    assert read >= measure.KINDS[what].__annotations__.keys() - elsewhere


@pytest.mark.parametrize("verb", ["run", "refit", "plan"])
def test_help_names_every_option_of_a_verb(verb):
    function = getattr(meshwise, verb)
    record = {"run": run.RunOptions, "refit": refit.RefitOptions, "plan": plan.PlanOptions}[verb]
    names = {one.name for one in dataclasses.fields(record)}
    assert inspect.signature(function).parameters.keys() == names
    assert all(f"\n{name}: " in function.__doc__ for name in names)


def test_ranks_read_what_was_asked_whatever_else_the_record_holds():
    asked = run.RunOptions(model="gpt-30m", layout=Layout(tp=2), steps=3, save=Path("kept"), seed=7)
    told = msgspec.json.decode(msgspec.json.encode(asked), type=run.Course)
    assert (told.steps, told.save, told.seed, told.mode) == (3, "kept", 7, "train")
    assert told.counts("cpu") == (3, 1, 4, 64)


def test_a_verb_takes_fields_or_a_record():
    @options.keywords(refit.RefitOptions)
    def verb(asked: refit.RefitOptions) -> refit.RefitOptions:
        return asked

    assert verb("a", "b", cap=5) == refit.RefitOptions(scenario=("a", "b"), cap=5)
    assert verb(scenario="a") == verb("a") == verb(verb("a"))
    with pytest.raises(TypeError, match="colour"):
        verb(colour="red")


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (refit.RefitOptions, {"warmup": -1}, "warmup = -1: must be >= 0"),
        (refit.RefitOptions, {"iterations": 1.5}, "iterations = 1.5: must be a whole number"),
        (refit.RefitOptions, {"method": "mpi"}, "method = 'mpi': must be one of nccl, nvshmem"),
        (refit.RefitOptions, {"train": 2}, "train = 2: must be a dict"),
        (refit.RefitOptions, {"scenario": (1,)}, "scenario = 1: must be text"),
        (refit.RefitOptions, {"changed": "2%"}, "changed = '2%': must be a number"),
        (refit.RefitOptions, {"cap": [1]}, "cap = [1]: must be text or a number"),
        (refit.RefitOptions, {"cap": None}, "cap = None: must be text or a number"),
        (run.RunOptions, {"check": "yes"}, "check = 'yes': must be True or False"),
        (run.RunOptions, {"steps": True}, "steps = True: must be a whole number"),
        (run.RunOptions, {"timeout": True}, "timeout = True: must be text or a number"),
        (run.RunOptions, {"plan": 5}, "plan = 5: must be text"),
        (plan.PlanOptions, {"top": None}, "top = None: must be a whole number"),
        (ring.RingOptions, {"ring_sizes": [[1, 2]]}, "ring_sizes = [1, 2]: must be a whole number"),
        (ring.RingOptions, {"seq_lengths": None}, "seq_lengths = None: must be a whole number"),
    ],
)
def test_a_value_of_a_wrong_kind_or_range_is_named(record, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record(**options)


def test_ranks_are_called_gpus_too():
    assert measure.GemmOptions(gpus=2).nproc == run.RunOptions(nproc=2).nproc == 2
    with pytest.raises(ValueError, match="gpus = 2: nproc is 3; give one of them"):
        measure.GemmOptions(gpus=2, nproc=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"square": (0,)}, "square = 0: must be >= 1"),
        ({"square": 64.5}, "square = 64.5: must be a whole number"),
        ({"square": "64"}, "square = '64': must be a whole number"),
        ({"seq_len": 0}, "seq_len = 0: must be >= 1"),
        ({"modes": "hot"}, "modes = 'hot': must be one of cold, warm, graph, sustained"),
        ({"dtypes": ["int8"]}, "dtypes = 'int8': must be one of fp64"),
        ({"gpus": True}, "gpus = True: must be a whole number"),
    ],
)
def test_each_of_several_values_is_in_its_range(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure.GemmOptions(**options)


def test_one_value_of_several_may_stand_alone():
    model = catalogue.find("gpt-30m")
    asked = measure.GemmOptions(model=model, square=64, modes=["cold"])
    assert (asked.model, asked.square, asked.modes) == ((model,), (64,), ("cold",))
    assert measure.GemmOptions(model=Path("config.json")).model == ("config.json",)
