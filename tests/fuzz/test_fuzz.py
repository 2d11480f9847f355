"""2,000 damaged inputs end as documented, every kind in its share; ``make fuzz`` runs 100,000."""

import pytest

from tests.fuzz import inputs, server

CASES, SEED = 2000, 1


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    server.prepare(folder)
    return folder


def test_damaged_inputs_end_as_documented(session):
    kinds = inputs.kinds()
    assert len(kinds) >= 18
    share = -(-CASES // len(kinds))
    ended = [server.run(session, SEED, kind, n) for kind in kinds for n in range(share)]
    wrong = [f"--seed {SEED} --only '{e.kind}/{e.number}': {e.wrong}" for e in ended if e.wrong]
    assert not wrong, "\npython -m tests.fuzz ".join(["", *wrong])


def test_undamaged_inputs_are_read(session, monkeypatch):
    """Some command of each kind goes through, or as far as where it would start ranks."""
    monkeypatch.setattr(server, "mutant", lambda data, form, rng: data)
    ended = {
        kind: [server.run(session, SEED, kind, number) for number in range(8)]
        for kind in inputs.kinds()
    }
    assert not [kind for kind, all_of in ended.items() if all(e.code == 2 for e in all_of)]
    assert not [e for all_of in ended.values() for e in all_of if e.wrong]
