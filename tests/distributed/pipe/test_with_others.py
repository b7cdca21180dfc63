"""A pipeline together with split layers, and what it is refused together with."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import deepspeed
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import DeepSpeedConfigError, LayoutError, PipelineError, UsageError
from deepspeed.pipe import PipelineModule
from deepspeed.tensor_parallel import splits_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import ranks, store_path

pytestmark = pytest.mark.usefixtures("with_transformers")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_allow_untested_optimizer": True,
}


def row(*layers):
    return PipelineModule(
        list(layers), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True
    )


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def llama(tie):
    import transformers as hf  # by the ranks that need it: it takes seconds

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, vocab_size=23, num_hidden_layers=2, tie_word_embeddings=tie))


def tokens(count=2):
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        batch = torch.randint(23, (2, 6), generator=generator)
        yield {"input_ids": batch, "labels": batch}


def whole_weights(engine):
    axis, splits, found = engine._parts.layout["tp"], splits_of(engine.module), {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            parts = [None] * axis.size
            torch.distributed.all_gather_object(parts, param.detach().clone(), group=axis.group)
        found[name] = splits[name].join(parts) if name in splits else parts[0]
    return found


def compare(found, end):
    for name, value in found.items():
        assert torch.allclose(value, end[name], atol=2e-6), name


@ranks(4)
def test_layers_of_a_stage_are_split():
    for stage, tie in ((1, True), (3, False)):
        whole = llama(tie)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        expected = [float(sum(whole(**batch).loss for batch in tokens()) / 2)]
        (sum(whole(**batch).loss for batch in tokens()) / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
        end = whole.state_dict()
        module = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        split = {"autotp_size": 2}
        more = {"tensor_parallel": split, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, **more})
        assert engine._parts.layout.sizes == {"pp": 2, "dp": 1, "sp": 1, "tp": 2}
        assert any("q_proj" in name for name in splits_of(module))
        assert [float(engine.train_batch(tokens()))] == pytest.approx(expected, abs=2e-6)
        compare(whole_weights(engine), end)
        engine.save_checkpoint(f"{store_path()}-{stage}", tag="t")
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **more})
        path = Path(f"{store_path()}-{stage}")
        engine.load_checkpoint(str(path), tag="t")
        compare(whole_weights(engine), end)
        engine.destroy()
        if deepspeed.comm.get_rank() == 0:
            compare(get_fp32_state_dict_from_zero_checkpoint(str(path), "t"), end)
            convert(path / "t", path / "universal")
        deepspeed.comm.barrier()
        again = PipelineModule(llama(tie), num_stages=4)
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, "zero_optimization": {"stage": stage}})
        for tag in ("t", "universal"):
            engine.load_checkpoint(str(path), tag=tag)
            compare(whole_weights(engine), end)
        engine.save_checkpoint(str(path), tag="four")
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=2, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **more})
        for tag in ("four", "universal"):
            engine.load_checkpoint(str(path), tag=tag)
            compare(whole_weights(engine), end)
        engine._checkpoints._section = engine._checkpoints._section.model_copy(update={"format": "safetensors"})
        engine.save_checkpoint(str(path), tag="native")
        engine.load_checkpoint(str(path), tag="native")
        compare(whole_weights(engine), end)
        engine.destroy()
        again = PipelineModule(llama(tie), num_stages=4)
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, "zero_optimization": {"stage": stage}})
        engine.load_checkpoint(str(path), tag="native")
        compare(whole_weights(engine), end)
        engine.destroy()


@ranks(2)
def test_what_does_not_go_together():
    plain = row(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(LayoutError, match=r"1 ranks hold each of the 2 stages, which .*autotp_size 2 does not divide"):
        deepspeed.initialize(model=plain, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})


# (ZeRO stage, weights tied, schedule, layers that are computed again at a time)
DIVIDED = [(0, True, "zbv", 0), (1, True, "1f1b", 1), (3, False, "zb-h1", 0)]
BOTH = {"autotp_size": 2, "sequence_parallel": True, "vocab_parallel_lm_head": True}


def train_whole(tie, steps):
    """Losses and weights of one process."""
    whole, losses = llama(tie), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(whole(**batch).loss for batch in tokens()) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole.state_dict()


def start(module, **section):
    more = {"tensor_parallel": {"autotp_size": 2, **section}}
    return deepspeed.initialize(model=module, config={**CONFIG, **more})[0]


def cut(tie=False, **options):
    return PipelineModule(llama(tie), num_stages=2, partition_method="uniform", **options)


@ranks(4)
def test_sequences_and_logits_that_stay_split():
    for stage, tie, schedule, interval in DIVIDED:
        expected, end = train_whole(tie, 2)
        module = cut(tie, schedule=schedule, activation_checkpoint_interval=interval)
        more = {"tensor_parallel": BOTH, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, **more})
        shares = tie and (engine.is_first_stage() or engine.is_last_stage())
        assert not shares or "model.embed_tokens.weight" in splits_of(module)
        assert ("lm_head.weight" in splits_of(module)) == engine.is_last_stage()
        before = dict(engine._links.sent)
        found = [float(engine.train_batch(tokens())) for _ in range(2)]
        assert found == pytest.approx(expected, abs=1e-6), (stage, schedule)
        for name, value in whole_weights(engine).items():
            worst = float((value - end[name]).abs().max())
            assert worst < 1e-6, f"{name} is {worst} away, with {schedule} at stage {stage}"
        if schedule == "1f1b" and not engine.is_first_stage():
            hidden = 2 * 2 * (2 * 3 * 16 * 4)  # steps, micro-batches; half of six tokens, in fp32
            assert engine._links.sent["gradient"] - before["gradient"] == hidden, "stages pass whole sequences"
        value, logits = engine.eval_batch(tokens(), return_logits=True)
        assert engine.module.cut._list.training, "an evaluation does not end training"
        assert logits is None or logits.shape == (4, 6, 23), "evaluations see whole logits"
        assert float(value) < found[-1]
        if tie and stage:
            check_files(engine, {"zero_optimization": {"stage": stage}}, tie)
        else:
            engine.destroy()


def check_files(engine, zero, tie):
    """What ranks and stages share lies in a checkpoint once, for any other number of them."""
    path, end = Path(store_path()), whole_weights(engine)
    engine.save_checkpoint(str(path), tag="t")
    engine.destroy()
    if deepspeed.comm.get_rank() == 0:
        compare(end, get_fp32_state_dict_from_zero_checkpoint(str(path), "t"))
    for stages, more in ((4, {}), (2, {"tensor_parallel": BOTH}), (2, {"tensor_parallel": {"autotp_size": 2}})):
        again = PipelineModule(llama(tie), num_stages=stages, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config={**CONFIG, **zero, **more})
        engine.load_checkpoint(str(path), tag="t")
        found = whole_weights(engine)
        compare({name: value for name, value in end.items() if name in found}, found)
        engine.destroy()


def own_loss(logits, labels):
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@ranks(4)
def test_what_cannot_stay_split():
    plain = row(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match="autotp_size is 2, but no layer of any stage can be split"):
        deepspeed.initialize(model=plain, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(DeepSpeedConfigError, match=r"sequence_parallel is true, and the PipelineModule is made of"):
        start(row(nn.Linear(8, 8), nn.Linear(8, 8)), sequence_parallel=True)
    with pytest.raises(DeepSpeedConfigError, match=r"vocab_parallel_embedding is true, and the model is a pipeline"):
        start(cut(), vocab_parallel_embedding=True)
    with pytest.raises(UsageError, match="vocab_parallel_lm_head is true, but no stage has a Linear"):
        start(cut(), vocab_parallel_lm_head=True, partition_config={"lm_head_patterns": ["nobody"]})
    halves = [
        {"patterns": [r".*\.(up|gate)_proj\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.down_proj\.weight"], "partition_type": "row"},
    ]
    with pytest.raises(PipelineError, match="self_attn is an attention that stays whole"):
        start(cut(), sequence_parallel=True, partition_config={"layer_specs": halves})
    engine = start(cut(), sequence_parallel=True)
    odd = [{name: value[:, :5] for name, value in each.items()} for each in tokens()]
    with pytest.raises(PipelineError, match="sequences of 5 tokens do not divide by 2 ranks"):
        engine.train_batch(iter(odd))
    expected, _ = train_whole(False, 1)
    assert float(engine.train_batch(tokens())) == pytest.approx(expected[0], abs=1e-6), "the next batch trains"
    engine.destroy()
    engine = start(cut(loss_fn=own_loss), vocab_parallel_lm_head=True)
    assert float(engine.train_batch(tokens())) == pytest.approx(expected[0], abs=1e-6), "a loss_fn sees whole logits"
    engine.destroy()
