"""Strategy: how a transformer is spread over devices, in the field's words, and what is wrong.

world = tp x cp x dp x pp        experts are spread over ep ranks of the dp x cp x tp ones
batch = micro_batch x num_microbatches x dp
"""

import math
from dataclasses import dataclass, fields

from partita.errors import PlanError
from partita.forecast.transformer import Transformer
from partita.plans import EXECUTIONS

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
RECOMPUTE = ("none", "selective", "full")
# One kernel as tuned for its devices; the one of 2023 on whatever devices; products with softmax as
# one kernel between them; every op a kernel of its own, softmax in f32.
ATTENTION = ("flash", "flash-2", "fused-softmax", "eager")
DTYPES = ("f32", "bf16", "f16")
MATMUL_DTYPES = ("f32", "tf32", "bf16", "f16", "f8", "f4")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees of parallelism and what else changes the step."""

    batch: int
    micro_batch: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    hsdp: int = 0  # ranks that one copy of parameters is sharded over; 0: all of dp
    recompute: str = "none"
    schedule: str = "1f1b"
    dtype: str = "bf16"
    matmul_dtype: str = ""  # "": dtype
    grad_dtype: str = "f32"
    execution: str = "eager"
    attention: str = "flash"
    dropout: bool = False
    overlap_dp: bool = True  # gradient reduction and parameter gathering beside computing
    overlap_tp: bool = False  # collectives of tensor parallelism in pieces beside products
    overlap_ep: bool = False  # exchanges of tokens between experts beside computing
    overlap_pp: bool = True  # sends and receives beside computing
    ends: int = 0  # layers fewer in the first and in the last stage than in the others
    master: bool = True  # f32 copies of parameters in the optimizer
    gathers: int = 1  # collectives in which a layer's sharded parameters are gathered
    fused_loss: bool = False  # the loss never writes logits in f32
    layers: tuple[int, ...] = ()  # of each stage; (): as even as they can be, see `ends`

    @property
    def fused_attention(self) -> bool:
        """Is attention one kernel that keeps no scores?"""
        return self.attention in ("flash", "flash-2")

    @property
    def world(self) -> int:
        """Devices."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a step."""
        return max(1, self.batch // (self.micro_batch * self.dp))

    @property
    def product_dtype(self) -> str:
        """What products are computed in."""
        return self.matmul_dtype or self.dtype

    def __str__(self) -> str:
        parts = [
            f"{name}={getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "dp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        parts += ["sp"] * self.sp + [f"zero={self.zero}"] * (self.zero > 0)
        parts += [f"hsdp={self.hsdp}"] * (self.hsdp > 0)
        schedule = f", {self.schedule}" if self.pp > 1 else ""
        recompute = f", {self.recompute} recompute" if self.recompute != "none" else ""
        named = " ".join(parts) or "one device"
        plural = "es" if self.num_microbatches != 1 else ""
        many = f"{self.num_microbatches} micro-batch{plural} of {self.micro_batch}"
        return f"{named}{schedule}, {many}{recompute}"


def check_strategy(model: Transformer, strategy: Strategy, num_devices: int) -> None:
    """Refuse what cannot be: each sentence says what was found and what to change."""
    for field in fields(Strategy):
        value = getattr(strategy, field.name)
        if field.type is int and value < (0 if field.name in ("zero", "hsdp", "ends") else 1):
            raise PlanError(f"is {value}", fix="use at least 1", field=field.name)
    s = strategy
    if s.world != num_devices:
        raise PlanError(
            f"tp={s.tp} x cp={s.cp} x dp={s.dp} x pp={s.pp} are {s.world} devices, "
            f"the cluster has {num_devices}",
            fix=_degrees_that_fit(s, num_devices),
            field="dp",
        )
    if s.micro_batch * s.dp > s.batch:
        raise PlanError(
            f"{s.micro_batch} x dp={s.dp} is more than the batch of {s.batch}",
            fix=f"use a micro-batch of at most {max(1, s.batch // s.dp)} or a larger batch",
            field="micro-batch",
        )
    if s.batch % (s.micro_batch * s.dp):
        raise PlanError(
            f"a batch of {s.batch} is not a whole number of micro-batches of {s.micro_batch} "
            f"for each of dp={s.dp} replicas",
            fix=f"use a multiple of {s.micro_batch * s.dp}",
            field="batch",
        )
    _check_names(s)
    _check_layers(model, s)
    _check_widths(model, s)


def check_divisions(model: Transformer, strategy: Strategy) -> None:
    """Refuse what frameworks refuse though a forecast could be made of it.

    Published runs have layouts of stages that no rule here knows, so `check_strategy` lets them be.
    """
    s = strategy
    if s.vpp > 1 and s.schedule != "interleaved":
        raise PlanError(
            f"vpp={s.vpp}, and {s.schedule} does not interleave chunks",
            fix="use schedule interleaved, or leave vpp out",
            field="vpp",
        )
    if s.schedule == "interleaved" and s.vpp == 1:
        raise PlanError(
            "interleaving needs several chunks on each rank",
            fix="use vpp of at least 2, or schedule 1f1b",
            field="schedule",
        )
    chunks = s.pp * s.vpp
    ends = {0, 1, 2}  # of the embedding and the output layer, those that count as a layer
    if s.vpp > 1 and all((model.layers + more) % chunks for more in ends):
        each = model.layers // s.pp if model.layers % s.pp == 0 else 1
        legal = [vpp for vpp in range(2, each + 1) if each % vpp == 0]
        raise PlanError(
            f"{model.layers} layers are not divided by pp={s.pp} x vpp={s.vpp} = {chunks} chunks",
            fix=f"use vpp of {_either(legal)}"
            if legal
            else f"use pp x vpp that divides {model.layers}, or leave vpp out",
            field="vpp",
        )
    if s.hsdp and s.zero == 0:
        raise PlanError(
            f"hsdp={s.hsdp} says over how many ranks a copy is sharded, and zero=0 shards nothing",
            fix="use zero=3 (or 1, 2), or leave hsdp out",
            field="hsdp",
        )


def _either(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _degrees_that_fit(s: Strategy, num_devices: int) -> str:
    others = s.tp * s.cp * s.pp
    if num_devices % others == 0:
        return f"use dp={num_devices // others}"
    return f"choose tp, cp and pp whose product divides {num_devices}"


def _check_names(s: Strategy) -> None:
    for name, value, known in (
        ("schedule", s.schedule, SCHEDULES),
        ("recompute", s.recompute, RECOMPUTE),
        ("execution", s.execution, EXECUTIONS),
        ("attention", s.attention, ATTENTION),
        ("dtype", s.dtype, DTYPES),
        ("matmul-dtype", s.product_dtype, MATMUL_DTYPES),
        ("grad-dtype", s.grad_dtype, DTYPES),
    ):
        if value not in known:
            raise PlanError(f"is {value!r}", fix=f"use one of {', '.join(known)}", field=name)
    if s.zero > 3:
        raise PlanError(f"is {s.zero}", fix="use 0, 1, 2 or 3", field="zero")
    if s.hsdp and s.dp % s.hsdp:
        raise PlanError(f"{s.hsdp} does not divide dp={s.dp}", fix="choose a divisor", field="hsdp")


def _check_layers(model: Transformer, s: Strategy) -> None:
    chunks = s.pp * s.vpp
    if s.layers and (len(s.layers) != s.pp or sum(s.layers) != model.layers or min(s.layers) < 0):
        raise PlanError(
            f"{','.join(map(str, s.layers))} are {sum(s.layers)} layers in {len(s.layers)} stages, "
            f"the model has {model.layers} and pp is {s.pp}",
            fix=f"give {s.pp} numbers that add up to {model.layers}",
            field="layers",
        )
    if s.vpp > 1 and s.pp == 1:
        raise PlanError(f"vpp={s.vpp} without a pipeline", fix="use pp of at least 2", field="vpp")
    if chunks > model.layers + 2:  # the embedding and the output layer may be chunks, too
        raise PlanError(
            f"pp={s.pp} x vpp={s.vpp} are {chunks} chunks, the model has {model.layers} layers",
            fix=f"use pp x vpp of at most {model.layers}",
            field="pp",
        )
    if s.schedule in ("interleaved",) and s.vpp > 1 and s.num_microbatches % s.pp:
        raise PlanError(
            f"{s.num_microbatches} micro-batches are not a multiple of pp={s.pp}, "
            "as interleaving needs",
            fix=f"use a batch that gives a multiple of {s.pp}",
            field="batch",
        )


def _check_widths(model: Transformer, s: Strategy) -> None:
    heads = model.heads
    if heads % s.tp and s.tp > 1:
        raise PlanError(
            f"tp={s.tp} does not divide {heads} heads",
            fix=f"use a divisor of {math.gcd(heads, model.inner)}",
            field="tp",
        )
    if model.latent is None and model.groups % s.tp and s.tp % model.groups:
        raise PlanError(
            f"tp={s.tp} neither divides {model.groups} heads of keys and values nor is a multiple",
            fix=f"use a divisor of {model.groups}",
            field="tp",
        )
    if s.sp and s.tp == 1:
        raise PlanError(
            "sequence parallelism splits what tensor parallelism repeats, and tp is 1",
            fix="use tp of at least 2 or leave sp out",
            field="sp",
        )
    if model.seq % (s.cp * (s.tp if s.sp else 1)):
        raise PlanError(
            f"{s.cp * (s.tp if s.sp else 1)} ranks do not divide a sequence of {model.seq}",
            fix="choose cp and tp that divide it",
            field="cp",
        )
    if s.ep > 1 and model.experts is None:
        raise PlanError(f"ep={s.ep} and the model has no experts", fix="leave it out", field="ep")
    if model.experts is not None and model.experts.count % s.ep:
        raise PlanError(
            f"ep={s.ep} does not divide {model.experts.count} experts",
            fix="choose a divisor",
            field="ep",
        )
    if s.dp * s.cp * s.tp % s.ep:
        raise PlanError(
            f"ep={s.ep} does not divide the {s.dp * s.cp * s.tp} ranks of one stage",
            fix=f"choose a divisor of {math.gcd(s.dp * s.cp * s.tp, model.experts.count)}"
            if model.experts
            else "leave it out",
            field="ep",
        )
