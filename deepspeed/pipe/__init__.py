"""Pipeline parallelism: layers spread over ranks, micro-batches that follow each other through them.

```
layers      a layer that is built where it is needed; which layers make a stage;  ties: shared weights
cutting     a Transformers model as layers: where its blocks are, its own forward without them
module      PipelineModule: the layers of this rank, and their files in a checkpoint
schedule/   which rank computes what when: data, without torch
messages    what travels between stages, as text and tensors
split       backward in two parts;  executor: plays a schedule
accord      what ranks agree upon around a batch
axes        a stage's split layers, experts and sequences; the norm over stages
engine      PipelineEngine: train_batch, eval_batch; micro-batches, the whole model on one rank
```
"""

from __future__ import annotations

from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
