"""Claims on plans hold whatever tuners do at the same time, on every database."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import UserError
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.search.budget import Budget
from autotune.search.claims import Claim, Claims, StudyRow
from autotune.search.database import Database
from autotune.search.options import SearchOptions
from autotune.search.retry import with_failure
from autotune.search.store import Store
from autotune.search.stored_trial import Finished
from autotune.search.tables import TUNERS, create_tables
from autotune.search.tuners import Tuner, Watch, share_devices, this_tuner
from autotune.space.plan import Plan
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"
CLUSTER = load_space(QUICKSTART).cluster
PLANS = {f"plan-{number}": Plan(1, 1, 4, 1, number, "1f1b", 1, (1,)) for number in range(1, 41)}
DONE = TrialOutcome(
    "ok",
    "",
    Measurement("wall", 1.0, 1.0, 1.0, 0.0, 1.0, (10,), 0.1, 1.0, "2.13", "cpu"),
    "2026-01-01T00:00:00+00:00",
    1.0,
)


def anything(claims: object) -> bool:
    return True


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'study.db'}"
        return
    server = request.getfixturevalue("postgres")
    yield server.url


class Study:
    """A new study, and tuners that open it each with a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"study-{time.monotonic_ns()}"
        self.opened: list[Database] = []

    def tuner(self, **changes: Any) -> Tuner:
        return dataclasses.replace(this_tuner(CLUSTER), **changes)

    def store(self, me: Tuner, grace_s: float = 30.0) -> Store:
        database = Database(self.url)
        self.opened.append(database)
        database.prepare(create_tables)
        study = optuna.create_study(
            storage=database.storage, study_name=self.name, direction="maximize", load_if_exists=True
        )
        claims = Claims(database, study._study_id, me)
        row = claims.begin_study(StudyRow("0" * 32, {"a": 1}))
        return Store(database, study, claims, row.mark, PLANS, None, grace_s)


@pytest.fixture
def study(url: str) -> Iterator[Study]:
    made = Study(url)
    yield made
    for database in made.opened:
        database.close()


def at_once(work: Callable[[int], Any], count: int = 6) -> list[Any]:
    """What `count` threads that begin together return."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(number: int) -> None:
        barrier.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_tuners_that_open_a_new_database_at_once_share_its_plans_and_keep_to_a_limit(study: Study) -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        with study.store(study.tuner(place=f"machine {number}")) as store:
            for fingerprint, plan in PLANS.items():
                trial = store.begin(plan, fingerprint, lambda claims: len(claims) < 25)
                if trial is not None:
                    begun.append(trial)
                    assert store.finish(trial, DONE, 1.0)

    at_once(work)
    assert sorted(begun) == list(range(25))  # as many as may be, each with a number of its own
    with study.store(study.tuner()) as store:
        finished = store.news().finished
    assert [one.number for one in finished] == list(range(25))
    assert len({one.plan for one in finished}) == 25


def test_cleaning_up_leaves_the_claims_of_a_search_that_joined_meanwhile(study: Study) -> None:
    fingerprint, plan = next(iter(PLANS.items()))
    with study.store(study.tuner(place="elsewhere")) as other, study.store(study.tuner()) as late:
        mine = other.begin(plan, fingerprint, anything)
        assert mine is not None
        late._claims.adopt({})  # as if it had looked for others before that one came
        assert late.begin(plan, fingerprint, anything) is None
        assert other.finish(mine, DONE, 1.0)


def test_outcome_of_a_tuner_that_lost_its_claim_does_not_count(study: Study) -> None:
    fingerprint, plan = next(iter(PLANS.items()))
    with study.store(study.tuner(place="elsewhere")) as slow, study.store(study.tuner(), grace_s=1.0) as other:
        slow._pulse._end.set()  # as if its machine stood still
        mine = slow.begin(plan, fingerprint, anything)
        assert mine is not None
        assert other.begin(plan, fingerprint, anything) is None
        assert list(other.news().flights) == [fingerprint]
        requeued: tuple[Plan, ...] = ()
        while not requeued:
            time.sleep(0.25)
            requeued = other.news().requeued
        assert requeued == (plan,)
        again = other.begin(plan, fingerprint, anything)
        assert again is not None
        assert not slow.finish(mine, DONE, 1.0)
        assert other.finish(again, DONE, 2.0)
        assert [one.number for one in slow.news().finished] == [again]


def test_outcome_written_right_before_a_kill_counts(study: Study) -> None:
    fingerprint, plan = next(iter(PLANS.items()))
    # Of this machine, but no process has this pid: it has died.
    dead = study.store(study.tuner(pid=2**22 + 1))
    dead._claims.join()
    number = dead.begin(plan, fingerprint, anything)
    assert number is not None
    trial = dead._trial(number)
    trial.set_user_attr("tokens_per_s", 5.0)
    trial.set_user_attr("outcome", dataclasses.asdict(DONE))
    with study.store(study.tuner()) as store:
        news = store.news()
    assert [(one.number, one.outcome) for one in news.finished] == [(number, DONE)]
    assert news.requeued == ()
    stored = optuna.load_study(study_name=study.name, storage=dead._database.storage)
    assert stored.best_value == 5.0


def test_failed_launches_are_free_for_another_try(study: Study) -> None:
    fingerprint, plan = next(iter(PLANS.items()))
    failed = dataclasses.replace(DONE, state="launcher", measurement=None, reason="port taken")
    with study.store(study.tuner()) as store:
        number = store.begin(plan, fingerprint, anything)
        assert number is not None
        assert store.finish(number, failed, None)
    with study.store(study.tuner()) as store:
        assert [one.outcome.state for one in store.news().finished] == ["launcher"]
        number = store.begin(plan, fingerprint, anything)
        assert number is not None
        assert store.finish(number, DONE, 1.0)
        assert store.begin(plan, fingerprint, anything) is None


def test_a_claim_in_place_of_a_trial_is_given_once_and_gives_the_trial_back(study: Study) -> None:
    plan = PLANS["plan-1"]
    failed = dataclasses.replace(DONE, state="failed", measurement=None, reason="ValueError: no\nmore", duration_s=4.0)
    with study.store(study.tuner()) as store:
        first = store.begin(plan, "plan-1", anything)
        assert first is not None
        assert store.finish(first, failed, None)
        assert store.over() == set()  # it is at work itself
    failure = Finished(first, plan, failed)
    with study.store(study.tuner(place="here")) as one, study.store(study.tuner(place="there")) as other:
        assert one.over() == other.over() == {first}
        assert one.begin(plan, "plan-1", anything) is None
        begun = [one.begin(plan, "plan-1", anything, failure), other.begin(plan, "plan-1", anything, failure)]
        assert begun[1] is None
        assert begun[0] is not None
        news = other.news()
        assert ([o.number for o in news.finished], list(news.flights)) == ([first], ["plan-1"])
        one.abandon(begun[0])
        assert other.news().flights == {}
        again = other.begin(plan, "plan-1", anything, failure)
        assert again is not None
        (living,) = one.others()
        assert one._claims.bury(living, {}) == []  # nothing to be measured in any case
        assert one.begin(plan, "plan-1", anything) is None
        third = one.begin(plan, "plan-1", anything, failure)
        assert third is not None
        assert not other.finish(again, DONE, 1.0)
        assert one.finish(third, with_failure(failure, DONE), 2.0)
        assert one.begin(plan, "plan-1", anything, failure) is None
        (told,) = [o for o in other.news().finished if o.number == third]
        assert (told.earlier_s, told.outcome.reason) == (4.0, "tried again: trial 0 was failed: ValueError: no")


def test_silence_is_measured_only_while_the_database_answers() -> None:
    me, other = this_tuner(CLUSTER), dataclasses.replace(this_tuner(CLUSTER), place="elsewhere", pid=1)
    watch = Watch(me, grace_s=30)
    assert watch.dead([me, other], now=0) == []
    assert watch.dead([me, other], now=500) == []  # the database was away, or this process stood still
    for now in range(505, 525, 5):
        assert watch.dead([me, other], now=now) == []
    assert watch.dead([me, other], now=530) == [other]
    beating = dataclasses.replace(other, beat=1)
    assert watch.dead([me, beating], now=535) == []
    assert watch.dead([me, dataclasses.replace(me, key="gone", pid=2**22 + 1)], now=540) != []


def test_devices_are_shared_on_one_machine_only_and_where_the_sets_meet() -> None:
    def tuner(place: str, devices: str) -> Tuner:
        return Tuner("key", "host", place, 1, "1.00", devices)

    assert share_devices(tuner("a/1", "cpu:0,1"), tuner("a/2", "cpu:1,2"))
    assert not share_devices(tuner("a/1", "cpu:0,1"), tuner("a/1", "cpu:2,3"))
    assert not share_devices(tuner("a/1", "accelerator:all"), tuner("b/1", "accelerator:all"))
    assert share_devices(tuner("a/1", "accelerator:all"), tuner("a/1", "accelerator:0"))


def test_searches_over_nodes_share_devices_where_their_nodes_meet_whatever_started_them() -> None:
    one, two = this_tuner(CLUSTER, ["a", "b"]), dataclasses.replace(this_tuner(CLUSTER, ["b", "c"]), place="elsewhere")
    assert share_devices(one, two)
    assert not share_devices(one, this_tuner(CLUSTER, ["c"]))
    on_a_node = dataclasses.replace(this_tuner(CLUSTER), host="c")
    assert share_devices(two, on_a_node)
    assert share_devices(on_a_node, two)
    assert not share_devices(one, on_a_node)


def test_a_database_that_restarts_is_waited_for_and_nothing_is_lost(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.database._SAY_AFTER_S", 0.0)  # however soon it is back
    study, notes = Study(postgres.url), list[str]()
    fingerprint, plan = next(iter(PLANS.items()))
    with study.store(study.tuner()) as store:
        store._database._note = notes.append
        number = store.begin(plan, fingerprint, anything)
        assert number is not None
        postgres.stop()
        timer = threading.Timer(1.5, postgres.start)
        timer.start()
        assert store.finish(number, DONE, 1.0)
        timer.join()
        assert [one.number for one in store.news().finished] == []  # it was told when it finished
    assert len(notes) == 1
    assert "waiting up to 60 s" in notes[0]
    with study.store(study.tuner()) as store:
        assert [one.number for one in store.news().finished] == [number]


def test_a_database_that_stays_away_is_an_error_in_words(postgres: Any) -> None:
    url = postgres.url.replace("autotune@", "autotune:topsecret@")
    database = Database(url, wait_s=0.5)
    postgres.stop()
    try:
        with pytest.raises(UserError, match="nothing is lost, --resume goes on") as told:
            database.run(lambda: optuna.get_all_study_names(database.storage))
        # What is tidied up after that isn't waited for again.
        with pytest.raises(UserError, match="waited 0 s"):
            database.run(lambda: optuna.get_all_study_names(database.storage))
    finally:
        postgres.start()
    assert "topsecret" not in str(told.value)
    assert database.run(lambda: optuna.get_all_study_names(database.storage)) is not None
    database.close()


def test_missing_driver_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.search.database.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'autotune\[postgresql\]'") as told:
        Database("postgresql://me:topsecret@host/db")
    assert "topsecret" not in str(told.value)
    with pytest.raises(UserError, match=r"pip install 'autotune\[mysql\]'"):
        Database("mysql://me:topsecret@host/db")


def test_a_tuner_that_was_taken_for_dead_claims_nothing_until_it_is_known_again(study: Study) -> None:
    with study.store(study.tuner()) as store:
        seen = store._claims.tuners()[0]
        assert store._claims.bury(seen, {}) == []
        assert store.begin(PLANS["plan-1"], "plan-1", anything) is None
        assert not store.take_final()
        store.news()
        assert store.begin(PLANS["plan-1"], "plan-1", anything) is not None


def test_a_budget_of_trials_forgets_failed_launches_alone_though_their_plans_are_tried_again() -> None:
    budget = Budget(SearchOptions(Path("unused"), trials=2), PLANS)
    claims = {
        "plan-1": Claim("plan-1", "a", "launcher", 0),
        "plan-2": Claim("plan-2", "b", "held", None),
    }
    assert budget.allows(claims, {"plan-1", "plan-2"})
    taken_again = claims | {"plan-1": Claim("plan-1", "b", "held", None)}
    assert not budget.allows(taken_again, {"plan-1", "plan-2"})


def test_a_study_that_was_changed_since_it_was_looked_at_is_not_joined(study: Study) -> None:
    first = study.store(study.tuner(key="a" * 32))
    late = study.store(study.tuner(key="b" * 32))
    late._identity = {"a": 1}
    assert first._claims.set_identity({"a": 2}, ())
    with pytest.raises(UserError, match="changed what this study searches"), late:
        pass
    assert [tuner.key for tuner in first._claims.tuners()] == []


def final_of(who: str, launches: int) -> dict[str, Any]:
    return {"who": who, "launches": [{"round": number, "who": who} for number in range(launches)]}


def test_of_two_searches_that_end_at_once_one_holds_the_final_and_leaves_a_whole_one(study: Study) -> None:
    ready = threading.Barrier(2)

    def work(number: int) -> tuple[bool, list[bool]]:
        with study.store(study.tuner(place=f"machine {number}")) as store:
            mine = store.take_final()
            ready.wait()
            saved = [store.save_final(final_of(f"search {number}", launches)) for launches in range(1, 20)]
            ready.wait()
            return mine, saved

    results = at_once(work, 2)
    assert sorted(mine for mine, _ in results) == [False, True]
    assert all(saved == [mine] * 19 for mine, saved in results)
    with study.store(study.tuner()) as store:
        assert store.final() == final_of(f"search {[mine for mine, _ in results].index(True)}", 19)


def test_a_search_that_lost_the_final_in_the_moment_it_writes_overwrites_nothing(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest gap: the one that takes the final over comes between the look at its claim and the write."""
    from autotune.search import store as module

    write, taken = module.write_final, list[bool]()

    def work() -> None:
        with study.store(study.tuner(place="there")) as other:
            (slow_one,) = [tuner for tuner in other.others() if tuner.place == "here"]
            assert other._claims.bury(slow_one, {}) is not None
            taken.append(other.take_final() and other.save_final(final_of("other", 9)))

    taker = threading.Thread(target=work)

    def slowly(connection: Any, number: int, values: dict[str, Any]) -> None:
        if values["who"] == "slow" and not taker.ident:
            taker.start()
            taker.join(timeout=1.0)  # it has to wait for this transaction, or it would be through by then
        write(connection, number, values)

    monkeypatch.setattr(module, "write_final", slowly)
    with study.store(study.tuner(place="here")) as slow:
        slow._pulse._end.set()  # as if its machine stood still
        assert slow.take_final()
        slow.save_final(final_of("slow", 5))
        taker.join()
        assert taken == [True]
        assert not slow.save_final(final_of("slow", 6))
        assert slow.final() == final_of("other", 9)


def test_a_final_that_an_earlier_version_stored_is_gone_on_with(study: Study) -> None:
    with study.store(study.tuner()) as store:
        store._study.set_user_attr("final", final_of("earlier", 3))
        assert store.final() == final_of("earlier", 3)
        assert store.take_final()
        assert store.save_final(final_of("now", 4))
        assert store.final() == final_of("now", 4)


def forget(store: Store) -> None:
    """Delete a tuner's row alone, as no search does: its claims stay."""
    with store._database.transaction() as connection:
        connection.execute(TUNERS.delete().where(TUNERS.c.key == store._claims.me.key))


def requeued_by(store: Store) -> tuple[Plan, ...]:
    deadline = time.monotonic() + 20
    while not (requeued := store.news().requeued):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return requeued


def test_plans_held_by_a_tuner_that_nobody_knows_are_free_after_the_grace_though_others_are_at_work(
    study: Study,
) -> None:
    (held, plan), (told, other_plan) = list(PLANS.items())[:2]
    with study.store(study.tuner(place="elsewhere")), study.store(study.tuner(), grace_s=1.0) as store:
        unknown = study.store(study.tuner(place="far away"))
        unknown._claims.join()
        assert unknown.begin(plan, held, anything) is not None
        ended = unknown.begin(other_plan, told, anything)
        assert ended is not None
        unknown._trial(ended).set_user_attr("tokens_per_s", 5.0)
        unknown._trial(ended).set_user_attr("outcome", dataclasses.asdict(DONE))
        assert unknown.take_final()
        forget(unknown)
        began = time.monotonic()
        assert set(store.news().flights) == {held, told}
        assert store.begin(plan, held, anything) is None
        while not (requeued := (news := store.news()).requeued):
            time.sleep(0.1)
            assert time.monotonic() - began < 20
        finished = [one.number for one in news.finished]
        assert (requeued, finished) == ((plan,), [ended])
        assert time.monotonic() - began >= 1.0
        again = store.begin(plan, held, anything)
        assert again is not None
        assert store.finish(again, DONE, 1.0)
        assert store.begin(other_plan, told, anything) is None  # its outcome had been written, and counts
        assert store.news().flights == {}
        assert store.take_final()


def test_a_living_tuner_whose_row_is_gone_loses_its_plan_and_its_outcome_counts_no_more(study: Study) -> None:
    fingerprint, plan = next(iter(PLANS.items()))
    with study.store(study.tuner(place="elsewhere")) as lost, study.store(study.tuner(), grace_s=1.0) as store:
        lost._pulse._end.set()
        mine = lost.begin(plan, fingerprint, anything)
        assert mine is not None
        forget(lost)
        assert requeued_by(store) == (plan,)
        again = store.begin(plan, fingerprint, anything)
        assert again is not None
        assert not lost.finish(mine, DONE, 1.0)
        assert store.finish(again, DONE, 1.0)
        assert [one.number for one in lost.news().finished] == [again]  # and it is known again
        assert len(store.others()) == 1
