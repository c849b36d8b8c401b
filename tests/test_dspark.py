"""The DSpark drafter against a cache-free restatement of its maths, over several rounds of a paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_oracle import MUTATIONS, Oracle
from tiny import tiny_llama_config, write_tiny_llama
from tiny_draft import write_tiny_dspark
from torch._subclasses.fake_tensor import FakeTensorMode

from core.builtin import builtin_draft_path
from core.engine.batch import ChunkRows, RaggedBatch
from core.errors import ModelLoadError
from core.kvcache.storage import GroupedHeads, KVStorage
from core.layers.linear import vocab_argmax
from core.models.weights import load_target
from core.spec.confidence import count_nan, survival
from core.spec.drafts.base import CommittedRows, DraftOutput, DraftRequest
from core.spec.drafts.dspark import DSparkDrafter, load_dspark

CPU = torch.device("cpu")
PAGE_SIZE = 4
TARGET = tiny_llama_config(num_hidden_layers=5, hidden_size=44, vocab_size=96)
MAX_POSITIONS = 64


class FakeTarget:
    """Embedding and head only; features are made up by the tests."""

    config = TARGET
    vocab_size = TARGET["vocab_size"]
    hidden_size = TARGET["hidden_size"]
    num_layers = TARGET["num_hidden_layers"]
    max_positions = MAX_POSITIONS
    kv_layers: list[GroupedHeads] = []  # noqa: RUF012

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(self.vocab_size, self.hidden_size, generator=random)
        self.head = torch.randn(self.vocab_size, self.hidden_size, generator=random) / self.hidden_size**0.5

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a drafter must not run the target")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


@dataclass
class Sequence:
    """What the engine would know of a sequence: its pages and how far it is committed."""

    pages: list[int]
    features: torch.Tensor  # [max positions, m * H]: the truth
    anchor: int
    length: int = 0  # p: exactly the positions below are published
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def slot(self, position: int) -> int:
        return self.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


class Engine:
    """Publishes and proposes for a few sequences and one padding sequence, as a captured step would."""

    def __init__(self, drafter: DSparkDrafter, num_sequences: int = 2) -> None:
        self.drafter = drafter
        per_sequence = MAX_POSITIONS // PAGE_SIZE
        num_pages = 1 + num_sequences * per_sequence
        self.storage = KVStorage(
            drafter.kv_layers, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
        )
        pages = np.random.default_rng(1).permutation(np.arange(1, num_pages)).tolist()
        random = torch.Generator().manual_seed(11)
        width = len(drafter.feature_layers) * TARGET["hidden_size"]
        self.sequences = [
            Sequence(
                pages=pages[index * per_sequence : (index + 1) * per_sequence],
                features=torch.randn(MAX_POSITIONS, width, generator=random),
                anchor=20 + index,
            )
            for index in range(num_sequences)
        ]

    def publish(self, counts: list[int], rows_per_sequence: int) -> None:
        """Commit counts[i] positions of sequence i out of rows_per_sequence; the others go to the dummy page."""
        positions, slots, features = [], [], []
        for sequence, count in zip(self.sequences, counts, strict=True):
            for offset in range(rows_per_sequence):
                position = sequence.length + offset
                committed = offset < count
                positions.append(position)
                slots.append(sequence.slot(position) if committed else offset % PAGE_SIZE)
                features.append(sequence.features[position] * (1.0 if committed else -30.0))
            sequence.length += count
            sequence.anchor = int(sequence.random.integers(TARGET["vocab_size"]))
        # One padding row, as a bucket would have.
        rows = CommittedRows(
            features=torch.stack([*features, torch.zeros_like(features[0])]),
            hidden=torch.zeros(len(features) + 1, TARGET["hidden_size"]),
            next_token_ids=torch.zeros(len(features) + 1, dtype=torch.int64),
            positions=torch.tensor([*positions, 0]),
            slot_mapping=torch.tensor([*slots, 0]),
        )
        self.drafter.publish(rows, self.storage.layers)

    def request(self) -> DraftRequest:
        width = self.drafter.width
        block = range(width)
        return DraftRequest(
            anchor_ids=torch.tensor([s.anchor for s in self.sequences] + [0]),
            anchor_positions=torch.tensor([s.length for s in self.sequences] + [0]),
            page_table=torch.tensor([s.pages for s in self.sequences] + [[0] * (MAX_POSITIONS // PAGE_SIZE)]),
            draft_slots=torch.tensor(
                [[s.slot(s.length + k) for k in block] for s in self.sequences]
                + [[k % PAGE_SIZE for k in block]]
            ),
        )

    def propose(self) -> DraftOutput:
        return self.drafter.propose(self.request(), self.storage.layers)

    def block_hidden(self) -> torch.Tensor:
        return self.drafter.block_hidden(self.request(), self.storage.layers)


def draft_and_oracle(path: Path, *, width: int = 5, **options: Any) -> tuple[DSparkDrafter, Oracle]:
    target = FakeTarget()
    write_tiny_dspark(path, TARGET, **options)
    oracle = Oracle.read(path, target.embedding, target.head)
    return load(path, target, width), oracle


def load(path: Path, target: Any, width: int = 5) -> DSparkDrafter:
    return load_dspark(
        path, target, width=width, dtype=torch.float32, device=CPU, max_positions=MAX_POSITIONS
    )


def assert_matches(engine: Engine, oracle: Oracle) -> None:
    """Compare block hidden states, drafts and confidence of every real sequence."""
    width = engine.drafter.width
    hidden, output = engine.block_hidden(), engine.propose()
    assert output.token_ids.shape == output.confidence.shape == (len(engine.sequences) + 1, width)
    assert output.token_ids.dtype == torch.int64
    assert output.confidence.dtype == torch.float32
    assert hidden.isfinite().all()  # the padding sequence included
    for index, sequence in enumerate(engine.sequences):
        expected = oracle.block_hidden(sequence.features[: sequence.length], sequence.anchor, width)
        torch.testing.assert_close(hidden[index], expected, atol=2e-5, rtol=2e-5)
        tokens, logits = oracle.draft(expected, sequence.anchor)
        assert output.token_ids[index].tolist() == tokens
        if engine.drafter.has_confidence:
            torch.testing.assert_close(output.confidence[index], torch.sigmoid(logits), atol=1e-5, rtol=1e-5)


def run_rounds(engine: Engine, check: Callable[[], None]) -> None:
    """Prompts of 5 and 11 tokens in chunks of 4, then rounds that accept none, some and all drafts."""
    for counts in ([4, 4], [1, 4], [0, 3]):
        engine.publish(counts, rows_per_sequence=4)
    check()
    width = engine.drafter.width
    for accepted in ([0, width], [width // 2, 0], [width, width // 2], [0, 0]):
        engine.publish([count + 1 for count in accepted], rows_per_sequence=width + 1)
        check()


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("width", [1, 2, 5, 7])
def test_drafter_matches_the_oracle_round_after_round(tmp_path: Path, markov: str, width: int) -> None:
    drafter, oracle = draft_and_oracle(tmp_path, width=width, markov=markov, seed=width)
    engine = Engine(drafter)
    run_rounds(engine, lambda: assert_matches(engine, oracle))


@pytest.mark.parametrize(
    "options",
    [
        {"confidence_with_markov": False},
        {"markov_rank": 0, "confidence_with_markov": False},
        {"num_layers": 1, "target_layer_ids": (-1, 3)},
        {"confidence": False},
    ],
    ids=["confidence of hidden alone", "no Markov head", "embedding as feature", "no confidence head"],
)
def test_variants_of_the_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    drafter, oracle = draft_and_oracle(tmp_path, **options)
    assert drafter.has_confidence == options.get("confidence", True)
    engine = Engine(drafter)
    run_rounds(engine, lambda: assert_matches(engine, oracle))
    if not drafter.has_confidence:
        assert engine.propose().confidence.eq(1.0).all()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(tmp_path: Path, mutation: str) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    oracle.mutation = mutation
    engine = Engine(drafter)
    engine.publish([4, 4], rows_per_sequence=4)
    with pytest.raises(AssertionError):
        assert_matches(engine, oracle)


def test_proposing_twice_changes_nothing(tmp_path: Path) -> None:
    """The block's temporary rows must not become context."""
    drafter, oracle = draft_and_oracle(tmp_path)
    engine = Engine(drafter)
    engine.publish([4, 2], rows_per_sequence=4)
    first, second = engine.propose(), engine.propose()
    assert torch.equal(first.token_ids, second.token_ids)
    assert torch.equal(first.confidence, second.confidence)
    assert_matches(engine, oracle)


def test_anchor_without_any_context(tmp_path: Path) -> None:
    """A prompt of one token: the anchor stands at position 0 and sees only its block."""
    drafter, oracle = draft_and_oracle(tmp_path)
    assert_matches(Engine(drafter), oracle)


def test_last_block_reaches_past_the_longest_sequence(tmp_path: Path) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    engine = Engine(drafter)
    length = MAX_POSITIONS - drafter.width
    engine.publish([length, length - 1], rows_per_sequence=length)
    assert_matches(engine, oracle)


def test_no_value_is_read_back(tmp_path: Path) -> None:
    """Under fake tensors an op that needs a value on the host, or a shape from data, raises."""
    drafter, _ = draft_and_oracle(tmp_path, markov="rnn")
    engine = Engine(drafter)
    request = engine.request()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fields = ("anchor_ids", "anchor_positions", "page_table", "draft_slots")
        fake = DraftRequest(**{name: mode.from_tensor(getattr(request, name)) for name in fields})
        output = drafter.propose(fake, engine.storage.layers)
        engine.publish([1, 2], rows_per_sequence=4)
    assert output.token_ids.shape == (3, 5)


def test_features_are_the_outputs_of_the_named_layers(tmp_path: Path) -> None:
    """Layer id L means transformers' hidden_states[L + 1]; one off changes the drafts."""
    transformers = pytest.importorskip("transformers")
    path = write_tiny_llama(tmp_path / "target", num_hidden_layers=4)
    target = load_target(path, dtype=torch.float32, device=CPU)
    drafter = load(write_tiny_dspark(tmp_path / "draft", target.config, target_layer_ids=(-1, 0, 2)), target)
    ids = torch.randint(3, 320, (9,), generator=torch.Generator().manual_seed(2))
    storage = KVStorage(
        target.kv_layers + drafter.kv_layers,
        num_pages=5,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=CPU,
    )
    caches, draft_caches = storage.layers[: target.num_layers], storage.layers[target.num_layers :]
    pages, positions = torch.tensor([2, 4, 1, 3]), torch.arange(9)
    slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    chunk = ChunkRows(first_row=0, num_rows=9, start=0, pages=pages)
    batch = RaggedBatch(input_ids=ids, positions=positions, slot_mapping=slots, decode=None, chunks=(chunk,))
    output = target.forward(batch, caches, feature_layers=drafter.feature_layers)
    rows = CommittedRows(
        features=output.features,
        hidden=output.hidden,
        next_token_ids=ids,
        positions=positions,
        slot_mapping=slots,
    )
    drafter.publish(rows, draft_caches)
    after = torch.arange(9, 14)
    request = DraftRequest(
        anchor_ids=torch.tensor([17]),
        anchor_positions=torch.tensor([9]),
        page_table=pages[None],
        draft_slots=(pages[after // PAGE_SIZE] * PAGE_SIZE + after % PAGE_SIZE)[None],
    )
    hidden = drafter.block_hidden(request, draft_caches)[0]

    reference = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        states = reference(ids[None], output_hidden_states=True).hidden_states
    oracle = Oracle.read(tmp_path / "draft", target.embed(torch.arange(320)), torch.empty(0))

    def expected(shift: int) -> torch.Tensor:
        features = torch.cat([states[max(layer + shift, 0)][0] for layer in (-1, 0, 2)], dim=-1)
        return oracle.block_hidden(features, 17, 5)

    torch.testing.assert_close(hidden, expected(1), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(hidden, expected(0), atol=1e-2)


def test_temperatures_scale_confidence_logits(tmp_path: Path) -> None:
    drafter, oracle = draft_and_oracle(tmp_path)
    temperatures = [0.5, 2.0, 3.0, 1.0, 1.5, 9.0, 9.0]
    (tmp_path / "confidence_temperatures.json").write_text(json.dumps({"temperatures": temperatures}))
    scaled = Engine(load(tmp_path, FakeTarget()))
    scaled.publish([3, 4], rows_per_sequence=4)
    output = scaled.propose()
    sequence = scaled.sequences[0]
    _, logits = oracle.draft(oracle.block_hidden(sequence.features[:3], sequence.anchor, 5), sequence.anchor)
    expected = torch.sigmoid(logits / torch.tensor(temperatures[: drafter.width]))
    torch.testing.assert_close(output.confidence[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperatures": [1, 1]}', "2 temperatures for 5 slots"),
        ('{"temperatures": [1, 1, 0, 1, 1]}', "temperature 0.0 is not positive"),
        ('{"temperatures": [1, 1, NaN, 1, 1]}', "temperature nan is not positive"),
        ('{"temps": [1]}', "cannot be read"),
        ("[", "cannot be read"),
    ],
)
def test_faulty_temperatures_are_refused(tmp_path: Path, content: str, message: str) -> None:
    write_tiny_dspark(tmp_path, TARGET)
    (tmp_path / "confidence_temperatures.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, FakeTarget())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_target_layers": 6}, "num_target_layers is 6 but the target has 5"),
        ({"hidden_size": 48}, "hidden_size is 48 but the target has 44"),
        ({"vocab_size": 90, "mask_token_id": 1}, "vocab_size is 90 but the target has 96"),
        ({"target_layer_ids": [0, 4]}, "must stay below 4"),
        ({"target_layer_ids": [2, 1]}, "must rise strictly"),
        ({"target_layer_ids": []}, "must rise strictly"),
        ({"block_size": 4}, "num_speculative_tokens is 5 but the draft's block_size is 4; choose 1 to 4"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not supported; use one of vanilla"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' are not supported"),
        ({"use_sliding_window": True}, "'sliding_attention' are not supported"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"speculators_model_type": "dspark"}, "speculators format"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architecture 'Gemma4DSparkModel'"),
        ({"mask_token_id": 96}, "mask_token_id 96 is outside"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"block_size": None}, "config.json lacks block_size"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_hidden_layers": 3}, "missing tensors"),
        ({"intermediate_size": 50}, "has shape"),
    ],
)
def test_unfit_drafts_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_tiny_dspark(tmp_path, TARGET, config_overrides=overrides)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, FakeTarget())


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    write_tiny_dspark(tmp_path, TARGET, config_overrides={"num_target_layers": 6, "block_size": 2})
    with pytest.raises(ModelLoadError, match=r"(?s)num_target_layers.*num_speculative_tokens"):
        load(tmp_path, FakeTarget())


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_vocabulary_matrices_must_be_the_targets(tmp_path: Path, name: str) -> None:
    target = FakeTarget()
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
    load(write_tiny_dspark(tmp_path / "same", TARGET, extra_tensors=copies), target)
    copies[name] = copies[name] + torch.eye(*copies[name].shape) * 1e-3
    path = write_tiny_dspark(tmp_path / "other", TARGET, extra_tensors=copies)
    with pytest.raises(ModelLoadError, match=f"{name}.*differs from the target's"):
        load(path, target)


def test_bfloat16_draft_stays_close_to_float32(tmp_path: Path) -> None:
    write_tiny_dspark(tmp_path, TARGET, dtype=torch.bfloat16)
    target = FakeTarget()
    exact = Engine(load(tmp_path, target))
    exact.publish([4, 3], rows_per_sequence=4)
    expected = exact.block_hidden()[:2]
    target.embedding, target.head = target.embedding.bfloat16(), target.head.bfloat16()
    drafter = load_dspark(
        tmp_path, target, width=5, dtype=torch.bfloat16, device=CPU, max_positions=MAX_POSITIONS
    )
    rough = Engine(drafter)
    rough.storage = KVStorage(
        drafter.kv_layers,
        num_pages=rough.storage.num_pages,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for sequence in rough.sequences:
        sequence.features = sequence.features.bfloat16()
    rough.publish([4, 3], rows_per_sequence=4)
    torch.testing.assert_close(rough.block_hidden()[:2].float(), expected, atol=0.15, rtol=0.1)
    assert rough.propose().confidence.dtype == torch.float32


def test_shipped_draft_runs_with_the_builtin_target() -> None:
    builtin = pytest.importorskip("core.models.builtin")
    try:
        target_path = builtin.ensure_builtin_model()
    except Exception as error:
        pytest.skip(f"the built-in target is not available here: {error}")
    target = load_target(target_path, dtype=torch.bfloat16, device=CPU, max_positions=128)
    drafter = load_dspark(
        builtin_draft_path(), target, width=7, dtype=torch.bfloat16, device=CPU, max_positions=128
    )
    assert drafter.feature_layers == (1, 8, 15, 22, 28)
    storage = KVStorage(drafter.kv_layers, num_pages=3, page_size=16, dtype=torch.bfloat16, device=CPU)
    request = DraftRequest(
        anchor_ids=torch.tensor([1]),
        anchor_positions=torch.tensor([0]),
        page_table=torch.tensor([[1, 2]]),
        draft_slots=torch.arange(16, 23)[None],
    )
    output = drafter.propose(request, storage.layers)
    assert output.token_ids.shape == (1, 7)
    assert ((output.confidence > 0) & (output.confidence < 1)).all()


def test_survival_clamps_before_the_product() -> None:
    confidence = np.array([[0.5, 2.0, 0.5], [-1.0, 1.0, 1.0], [1.0, np.nan, 1.0]], dtype=np.float32)
    assert survival(confidence).tolist() == [[0.5, 0.5, 0.25], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert count_nan(confidence) == 1
    assert survival(np.ones((0, 7), dtype=np.float32)).shape == (0, 7)


@pytest.mark.parametrize("vocab_size", [96, 97, 1024, 1536])
def test_vocab_argmax_takes_the_first_of_equal_entries(vocab_size: int) -> None:
    logits = torch.randint(0, 9, (40, vocab_size), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(vocab_argmax(logits), logits.argmax(-1))
    assert (vocab_argmax(torch.full((2, vocab_size), float("nan"))) < vocab_size).all()
