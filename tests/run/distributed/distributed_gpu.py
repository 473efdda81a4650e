"""One rank on a GPU: plans on NCCL against the model in one process on the same GPU.

python tests/run/distributed/distributed_gpu.py
"""

import os
import sys

import torch
from distributed_models import make
from distributed_plans import apart, graph_of, in_one_process, pipeline, sgd
from torch.distributed import TCPStore

PLANS = {
    "1F1B": {"groups": 1, "name": "1f1b", "count": 2},
    "ZB-H1, checkpointing": {"groups": 1, "name": "zb-h1", "count": 2, "checkpointing": "full"},
}


def run_on_gpu(models=("mlp", "gpt", "gpt-dropout", "resnet", "lstm", "t5")):
    """The largest error of losses, gradients and parameters after two steps, by model and plan."""
    from partita.run.distributed.engine import execute

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", LOCAL_RANK="0",
        WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.backends.cudnn.allow_tf32 = False
    errors = {}
    for model in models:
        graph = graph_of(*make(model))
        for name, settings in PLANS.items():
            module, args = make(model)
            plan = pipeline(graph, **settings)
            args = tuple(arg.cuda() for arg in args)
            engine = execute(
                plan, module.cuda(), optimizer=sgd, device="cuda", keep_gradients=True,
                example=args,
            )  # fmt: skip
            losses = [engine.step(*args) for _ in range(2)]
            state, gradients = engine.full_state_dict(), engine.full_gradients()
            engine.board.close()
            if "dropout" in model:  # other random numbers than one process draws
                errors[model, name] = 0.0 if losses[1] < losses[0] else float("inf")
                continue
            count = plan.schedule.num_microbatches
            alone = make(model)[0].cuda()
            wanted, grads, after = in_one_process(alone, args, count, 2, sgd)
            errors[model, name] = max(
                apart(state, {key: value.cpu() for key, value in after.items()}),
                apart(gradients, {key: value.cpu() for key, value in grads.items()}),
                *(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
            )
    return errors


if __name__ == "__main__":
    sys.stdout.write(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    for (model, name), error in run_on_gpu().items():
        sys.stdout.write(f"{model:12} {name:22} {error:.2g}\n")
