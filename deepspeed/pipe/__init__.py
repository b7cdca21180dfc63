"""Pipeline parallelism: layers spread over ranks, micro-batches that follow each other through them."""
