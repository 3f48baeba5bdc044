"""Choice: what a shape is forecast to do is what decoding does, and the fastest that is tried is taken."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from specdecode_ref.drafters import SMALL, choice, measuring
from specdecode_ref.drafters.calibration import Calibration, Draft
from specdecode_ref.drafters.choice import candidates, forecast, resolve
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.optimal import optimal
from specdecode_ref.drafters.shapes import Auto, Dynamic, Optimal, Sampled, Shape, Static, chain, parse
from specdecode_ref.errors import InputError
from specdecode_ref.models.table import TableModel
from tests.ref.test_calibration import invented
from tests.ref.test_measuring import DRAFT, SUBJECT, Letters, rounds, standard, written

pytestmark = pytest.mark.usefixtures("short_calibration")

REPLAYED = (
    *("chain:1", "chain:4", "chain:8", "static:0", "static:narrow", "static:0.1.2.3.00.01.10.000.0000"),
    *("dynamic:3,4,6", "dynamic:6,4,16", "dynamic:4,4,9,0.05", "dynamic:5,4,16,0.2", "dynamic:2,4,4,0.4"),
    *("dynamic:6,4,16,0,0.5", "dynamic:6,4,9,0.05,0.7", "dynamic:4,4,16,0.02,0.9"),
)


def test_a_forecast_is_what_decoding_does() -> None:
    """Rounds and tokens at temperature 0, for chains, static trees and dynamic ones as wide as the wide drafts."""
    found = standard()
    lengths = [len(text) for text in found.texts]
    assert lengths == [measuring.PLACES] * 2
    taus = set()
    for text in REPLAYED:
        shape = cast(Shape, parse(text))
        total, tokens = rounds(shape, lengths)
        assert forecast(shape, found).tau == tokens / total, text
        taus.add(tokens / total)
    assert len(taus) > 5, "the shapes must differ, or nothing was compared"


def test_a_narrow_dynamic_tree_is_replayed_nearly() -> None:
    found = standard()
    for shape in (Dynamic(4, 2, 6), Dynamic(5, 3, 9, 0.1), Dynamic(4, 1, 4), Dynamic(5, 3, 9, 0.05, 0.5)):
        total, tokens = rounds(shape, [measuring.PLACES] * 2)
        assert forecast(shape, found).tau == pytest.approx(tokens / total, rel=0.05)


def test_the_rows_and_levels_that_are_paid_are_those_of_the_real_trees() -> None:
    """A dynamic tree with a floor varies in size, and so does what a round costs."""
    found, opened = standard(), []

    class Counting(TableModel):
        def forward(self, tokens: Any, parents: Any, cache: Any, features: Any = ()) -> Any:
            opened.append(tokens.shape[1])
            return super().forward(tokens, parents, cache, features)

    prompt, draft = Letters().encode(measuring.PROMPTS[0]), Counting(DRAFT.table, DRAFT.tilt)
    for shape in (
        Dynamic(4, 4, 9, 0.05),
        Dynamic(6, 4, 12, 0.2),
        Dynamic(6, 4, 12, 0.05, 0.5),
        Dynamic(3, 4, 12),
        Static(((0,), (1,), (0, 0), (1, 0))),
    ):
        sizes = set()
        for place, tree in enumerate(measuring._proposals(ModelDrafter(draft, shape), prompt, written(), ())):
            wide = found.texts[0][place]
            if isinstance(shape, Dynamic):
                grown = choice._Grown.of(wide, shape.depth, shape.width)
                played = choice._cut(shape)(grown)
            else:
                played = choice._fixed(shape)(wide)
            assert played.rows == len(tree)
            assert opened[-len(played.opened) :] == list(played.opened), "the first of them reads the root"
            assert place == 0 or len(opened) == len(played.opened)
            sizes.add((played.rows, played.opened))
            opened.clear()
        assert len(sizes) > 3 if isinstance(shape, Dynamic) and shape.floor + shape.reach else len(sizes) == 1


def test_optimal_is_the_best_tree_for_the_measured_acceptance() -> None:
    found = invented()
    assert resolve(Optimal(4), found) == optimal(found.acceptance, 4)
    for shape in (chain(3), Static(((0,),)), Dynamic(2, 2, 3)):
        assert resolve(shape, found) is shape


def test_auto_is_the_fastest_of_all_it_tries() -> None:
    found = invented(places=15)
    tried = dict(candidates(found))
    best = resolve(Auto(), found)
    assert tried[best].speed == max(f.speed for f in tried.values())
    assert {type(shape) for shape in tried} == {Sampled, Static, Dynamic} and len(tried) > 500
    assert SMALL in tried, "what is drafted where nobody says must not be out of its reach"
    narrower = resolve(Auto(), found, (Dynamic,))
    assert tried[narrower].speed == max(f.speed for shape, f in tried.items() if isinstance(shape, Dynamic))
    for shape in random.Random(0).sample(list(tried), 40):
        assert forecast(shape, found) == tried[shape]


def test_auto_follows_the_costs() -> None:
    """Free rows make large trees, dear rows small ones, dear levels shallow ones; a floor pays where rows are dear."""

    def nodes(**costs: Any) -> tuple[int, int, float]:
        """Nodes, levels and floor."""
        shape = resolve(Auto(), invented(places=15, **costs))
        if isinstance(shape, Dynamic):
            return shape.nodes, shape.depth, shape.floor
        return shape.nodes, len(shape.branching) if isinstance(shape, Sampled) else max(map(len, shape.paths)), 0.0

    flat = {"rows": {1: 1.0, 64: 1.0}, "start": 1e-6, "level": {1: 1e-6}}
    assert nodes(**flat)[0] >= 6
    assert nodes(**flat | {"rows": {1: 1.0, 2: 10.0}})[0] == 1
    assert nodes(**flat | {"level": {1: 50.0}})[1] == 1
    steep = nodes(**flat | {"rows": {1: 1.0, 2: 1.4, 3: 1.8, 64: 26.0}})
    assert steep[0] < nodes(**flat)[0] or steep[2] > 0


def test_a_forecast_by_hand() -> None:
    parents, scores = (-1, 0, 0, 1), (0.0, -0.5, -1.5, -2.5)
    accepted = [(0, 1, 3), (0,), (0,), (0, 2), (0, 1), (0,)]
    texts = (tuple(Draft(parents, scores, path) for path in accepted),)
    found = Calibration(SUBJECT, {1: 1.0, 2: 2.0, 4: 6.0}, 0.5, {1: 0.25, 2: 0.35}, texts)
    # chain:2 starts rounds at places 0 (accepts 2), 3 (0) and 4 (1); three rows cost 4, one further level 0.25
    assert forecast(chain(2), found) == (6 / 3, 6 / (3 * (4.0 + 0.5 + 0.25)))
    # static:0.1 at places 0 (1), 2 (0), 3 (1), 5 (0), no further level
    assert forecast(Static(((0,), (1,))), found) == (6 / 4, 6 / (4 * 4.5))
    # all three nodes: places 0 (2), 3 (1), 5 (0); the second level opens two nodes
    assert forecast(Dynamic(2, 2, 3), found) == pytest.approx((6 / 3, 6 / (3 * (6.0 + 0.5 + 0.35))))
    # a floor of e^-1 keeps node 1 alone: places 0 (1), 2 (0), 3 (0), 4 (1); only node 1 is opened
    assert forecast(Dynamic(2, 2, 3, 0.36), found) == pytest.approx((6 / 4, 6 / (4 * (2.0 + 0.5 + 0.25))))


def test_larger_sizes_than_measured_cost_in_proportion() -> None:
    found = Calibration(SUBJECT, {1: 1.0, 4: 2.0}, 0.1, {1: 0.1, 2: 0.4}, invented().texts)
    prices = choice._Prices.of(found)
    assert [prices.rows[n] for n in (1, 2, 4, 8)] == pytest.approx([1.0, 4 / 3, 2.0, 4.0])
    assert [prices.level[n] for n in (1, 2, 3)] == pytest.approx([0.1, 0.4, 0.6])


def test_a_sampled_tree_has_no_forecast() -> None:
    with pytest.raises(InputError, match="filled by rank"):
        forecast(Sampled((2, 2)), invented())
