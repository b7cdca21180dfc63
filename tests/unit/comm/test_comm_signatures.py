"""The public surface: every name and signature of the reference, exact exports, no deprecation noise, light import."""

import inspect
import subprocess
import sys

import pytest
import torch.distributed as td

from deepspeed import comm

# `debug` is None instead of the reference's name of an import-time frame; `timeout` is None for DEEPSPEED_TIMEOUT.
SIGNATURES = """
all_gather(tensor_list, tensor, group=None, async_op=False, prof=False, log_name='all_gather', debug=None)
all_gather_coalesced(output_tensors, input_tensors, group=None, async_op=False)
all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False, prof=False,
    log_name='all_gather_into_tensor', debug=None)
all_gather_object(object_list, obj, group=None, prof=False, log_name='all_gather_object', debug=None)
all_reduce(tensor, op=SUM, group=None, async_op=False, prof=False, log_name='all_reduce', debug=None)
all_reduce_coalesced(tensors, op=SUM, group=None, async_op=False, prof=False, log_name='all_reduce', debug=None)
all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False, prof=False, log_name='all_to_all',
    debug=None)
all_to_all_single(output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False,
    prof=False, log_name='all_to_all_single', debug=None)
allgather_fn(output_tensor, input_tensor, group=None, async_op=False, debug=None)
barrier(group=None, async_op=False, device_ids=None, prof=False, log_name='barrier', debug=None)
batch_isend_irecv(p2p_op_list, prof=False, log_name='batch_isend_irecv', debug=None)
broadcast(tensor, src, group=None, async_op=False, prof=False, log_name='broadcast', debug=None)
broadcast_object_list(object_list, src, group=None, device=None, prof=False, log_name='broadcast_object_list',
    debug=None)
configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None)
destroy_process_group(group=None)
enable_symm_mem_for_group(group_name)
gather(tensor, gather_list=None, dst=0, group=None, async_op=False, prof=False, log_name='gather', debug=None)
get_all_ranks_from_group(group=None)
get_comm_operation_count()
get_global_rank(group=None, group_rank=0)
get_local_rank()
get_logged_comm_ops()
get_rank(group=None)
get_world_group()
get_world_size(group=None)
has_all_gather_into_tensor()
has_all_reduce_coalesced()
has_coalescing_manager()
has_comm_data()
has_reduce_scatter_tensor()
in_aml()
in_aws_sm()
in_dlts()
inference_all_reduce(tensor, op=SUM, group=None, async_op=False, prof=False, log_name='all_reduce', debug=None)
init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None,
    init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1)
initialize_mesh_device(mesh_shape, mesh_dim_names)
irecv(tensor, src=None, group=None, tag=0, prof=False, log_name='irecv', debug=None)
is_available()
is_initialized()
isend(tensor, dst, group=None, tag=0, prof=False, log_name='isend', debug=None)
log_summary(show_straggler=False, return_dict=False)
monitored_barrier(group=None, timeout=None, wait_all_ranks=False, prof=False, log_name='monitored_barrier',
    debug=None)
mpi_discovery(distributed_port=29500, verbose=True)
recv(tensor, src=None, group=None, tag=0, prof=False, log_name='recv', debug=None)
reduce(tensor, dst, op=SUM, group=None, async_op=False, prof=False, log_name='reduce', debug=None)
reduce_scatter(output, input_list, op=SUM, group=None, async_op=False, prof=False, log_name='reduce_scatter',
    debug=None)
reduce_scatter_fn(output_tensor, tensor, op=SUM, group=None, async_op=False, prof=False, debug=None)
reduce_scatter_tensor(output_tensor, tensor, op=SUM, group=None, async_op=False, prof=False,
    log_name='reduce_scatter_tensor', debug=None)
reset_log()
scatter(tensor, scatter_list=None, src=0, group=None, async_op=False, prof=False, log_name='scatter',
    debug=None)
send(tensor, dst, group=None, tag=0, prof=False, log_name='send', debug=None)
"""


LINES = SIGNATURES.replace("\n    ", " ").strip().splitlines()  # a continued line is indented


def shown(function):
    parameters = inspect.signature(function).parameters.values()
    texts = []
    for parameter in parameters:
        default = parameter.default
        if default is inspect.Parameter.empty:
            texts.append(parameter.name)
        else:
            value = "SUM" if default is td.ReduceOp.SUM else repr(default)
            texts.append(f"{parameter.name}={value}")
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return f"({', '.join(texts)})"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_signature(line):
    name, _, rest = line.partition("(")
    assert shown(getattr(comm, name)) == "(" + rest


def test_p2p_op_and_new_group():
    assert shown(comm.P2POp) == "(op, tensor, peer, group=None, tag=0)"
    assert next(iter(inspect.signature(comm.new_group).parameters)) == "ranks"


def test_logger_methods():
    logger = comm.CommsLogger()
    expected = {
        "configure": "(comms_config)",
        "append": "(raw_name, record_name, latency, msg_size)",
        "has_data": "()",
        "reset_data": "()",
        "get_operation_names": "()",
        "get_total_operations": "()",
        "get_operation_summary": "(operation_name)",
        "log_all": "(print_log=True, show_straggler=False, return_dict=False)",
    }
    assert {name: shown(getattr(logger, name)) for name in expected} == expected


def test_torch_names_are_torchs():
    for name in ("ProcessGroup", "Work", "group", "GroupMember", "Backend", "get_process_group_ranks"):
        assert getattr(comm, name) is getattr(td, name)


def test_reduce_ops():
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
        assert getattr(comm.ReduceOp, name) == getattr(td.ReduceOp, name)
    assert comm.ReduceOp.UNUSED not in list(td.ReduceOp.RedOpType.__members__.values())
    assert isinstance(comm.ReduceOp.SUM, td.ReduceOp)


def test_exports_are_exact():
    assert sorted(comm.__all__) == comm.__all__
    assert all(getattr(comm, name) is not None for name in comm.__all__)


@pytest.mark.slow
def test_import_is_light():
    """Nothing optional is loaded by the import (numpy comes with torch)."""
    code = "import sys; import deepspeed.comm; print(*{'pydantic', 'hjson', 'rich', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_capabilities():
    assert comm.has_all_gather_into_tensor()
    assert comm.has_reduce_scatter_tensor()
    assert comm.has_all_reduce_coalesced()
    assert comm.has_coalescing_manager()
