"""A pipeline together with split layers, and what it is refused together with."""

from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import LayoutError, UsageError
from deepspeed.pipe import PipelineModule
from deepspeed.tensor_parallel import splits_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import ranks, store_path

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
        batch = torch.randint(23, (2, 5), generator=generator)
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
        engine.destroy()


@ranks(2)
def test_what_does_not_go_together():
    plain = row(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(LayoutError, match=r"1 ranks hold each of the 2 stages, which .*autotp_size 2 does not divide"):
        deepspeed.initialize(model=plain, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})


@ranks(4)
def test_layers_of_which_none_can_be_split():
    plain = row(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match="autotp_size is 2, but no layer of any stage can be split"):
        deepspeed.initialize(model=plain, config={**CONFIG, "tensor_parallel": {"autotp_size": 2}})
