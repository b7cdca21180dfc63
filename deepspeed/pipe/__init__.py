"""Pipeline parallelism: layers spread over ranks, micro-batches that follow each other through them.

```
specs       a layer that is built where it is needed;  partition: which layers make a stage;  ties: shared weights
outline     where the blocks of a Transformers model are;  ghosts: its own forward without them;  cutting: its layers
module      PipelineModule: the layers of this rank
schedule/   which rank computes what when: data, without torch
forms       what travels between stages, as text and tensors;  wires: the messages
split       backward in two parts;  executor: plays a schedule
feed        micro-batches;  accord: what ranks agree upon around a batch
axes        a stage's split layers and experts;  measure: the norm over stages;  gathering: the whole model on one rank
engine      PipelineEngine: train_batch, eval_batch;  lost: the stages of ranks that an error names
```
"""

from __future__ import annotations

from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
