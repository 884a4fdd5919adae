# SPDX-License-Identifier: Apache-2.0
"""SGLang's Scheduler over tiny models: what it generates greedily. Run by contract_engine.py, on the CPU, and test_sglang_engine.py.

usage: whole_engine.py FOLDER RUNS. FOLDER: of folders of models. RUNS: JSON, for each name of a run the name of a model, and fields of
ServerArgs; retract: requests leave the batch now and then, and are computed anew, as where memory is short. Writes FOLDER/<run>.json: the
tokens of each request, and the batches. Runs are processes, forked behind the imports, which take most of the time. Exits with the number
of those that failed. ENGINE_DEVICE=cuda, in the environment: on the GPU, and a single run, since what is imported there cannot be forked.
"""

import faulthandler
import importlib.util
import json
import os
import pathlib
import socket
import sys
import traceback
from array import array

DEVICE = os.environ.get("ENGINE_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

if DEVICE == "cpu":
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import stand_ins

    stand_ins.make_mock("sgl_kernel")  # of the CPU; what SGLang calls of it needs AMX
else:
    import gpu_stand_ins

import torch

from engine_requests import NEW_TOKENS, prompts

LATER, STEPS = 5, 1000


def import_sglang(models):
    """models: those of SGLang's modules of models that are wanted. It would import all: seconds."""
    folder = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/models"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(path.stem for path in folder.iterdir() if path.stem not in models)
    for module in ("managers.scheduler", "models.registry", "server_args"):
        importlib.import_module(f"sglang.srt.{module}")


def free_port():
    """A port of this process's own, below those that the system gives to sockets which ask for any. One of those, asked for and let go,
    another process may be given before the engine listens on it."""
    first = 20000 + os.getpid() % 10000
    for port in range(first, first + 100):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of the ports {first} to {first + 99} is free")


def scheduler(folder, retract=False, **fields):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    args = ServerArgs(
        model_path=folder, skip_tokenizer_init=True, device=DEVICE, context_length=1024, max_running_requests=8, chunked_prefill_size=128,
        disable_overlap_schedule=True, random_seed=0, sampling_backend="pytorch", mem_fraction_static=0.5, nccl_port=free_port(),
        **{"dtype": "float32", "disable_cuda_graph": True, "max_total_tokens": 2048, **fields})
    from sglang.srt.managers import scheduler as module

    module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = retract, 10
    ranks = module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    module.publish(args, role="scheduler", ranks=ranks)
    return module.Scheduler(args, PortArgs.init_new(args))


def request(name, ids):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name, input_text=None, input_ids=array("q", ids), input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False)


@torch.no_grad()
def generate(server, first, later):
    """Steps of the scheduler's own loop, until nothing is left. -> a record of what contract_engine.py looks at."""
    requests, batches, graphs, expected = {}, [], [], len(first) + len(later)
    server.process_input_requests([request(str(i), ids) for i, ids in enumerate(first)])
    waiting = [request(str(len(first) + i), ids) for i, ids in enumerate(later)]
    for _ in range(STEPS):
        plan = server.get_next_batch_to_run(running_batch=server.running_batch, last_batch=server.last_batch)
        server.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            requests.update((each.rid, each) for each in batch.reqs)
            batches.append([batch.forward_mode.name, len(batch.reqs)])
            result = server.run_batch(batch)
            graphs += [batch.forward_mode.name] if result.can_run_cuda_graph else []
            server.process_batch_result(batch, result)
        server.last_batch = batch
        if waiting and len(batches) >= LATER:
            server.process_input_requests(waiting)
            waiting = []
        if sum(each.finished() for each in requests.values()) == expected:
            break
    names = sorted(requests, key=int)
    return {"tokens": [list(requests[name].output_ids) for name in names], "cached": [requests[name].cached_tokens for name in names],
            "retracted": sum(requests[name].retraction_count for name in names), "batches": batches, "graphs": graphs}


def run(folder, name, model, fields):
    with open(folder / f"{name}.log", "w") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    try:
        if DEVICE != "cpu":
            import_sglang({"registry", model})
            gpu_stand_ins.patch()
        made = generate(scheduler(str(folder / model), **fields), *prompts())
        (folder / f"{name}.json").write_text(json.dumps(made))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # what is left is only to be torn down


def main(folder, runs):
    folder, runs = pathlib.Path(folder), json.loads(runs)
    if DEVICE != "cpu":
        ((name, (model, fields)),) = runs.items()
        faulthandler.dump_traceback_later(float(os.environ.get("ENGINE_SECONDS", "120")), exit=True)
        run(folder, name, model, fields)
    import_sglang({"registry", *(model for model, _ in runs.values())})
    children = []
    for name, (model, fields) in runs.items():
        child = os.fork()
        if child == 0:
            run(folder, name, model, fields)
        children.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
