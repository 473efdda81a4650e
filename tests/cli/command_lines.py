"""Command lines that a user may type, and the smallest JSON Schema checker that ours need.

A line is the words after `partita`; `{folder}` is a fresh folder with the files that `make_files`
puts there, `{data}` the test data. What is after `->` is a file that must be there afterwards.
"""

import re
from typing import Any

NEEDS_MORE = {"accelerate", "serve", "run", "compare-trace"}  # a GPU, a browser, ranks, their trace
QUICK = "-q --time-limit 1"
PLANS = ("one.json", "two.json")
MODELS = ("alexnet", "squeezenet1_1", "gpt2@16", "{folder}/graph.json", "{folder}/graph.txt",
          "{data}/hf/qwen2.5-0.5b.json@8")  # fmt: skip
MACHINES = ("1xA100", "2xA100", "2xV100+2xP100", "malvik", "{folder}/machine.toml")

GOOD: list[str] = [
    "--help", "--version", "models", "clusters", "methods", "doctor", "schema",
    *(f"{command} --help" for command in (
        "plan", "shard", "partition", "place", "experiment", "schedule", "streams", "rtasks",
        "solve", "profile", "compare", "simulate", "explain", "diff", "report", "verify",
        "validate", "run", "compare-trace", "emit", "models", "clusters", "methods", "schema",
        "doctor", "accelerate", "export", "serve",
    )),
    *(f"{command} --json" for command in ("models", "clusters", "methods", "doctor", "schema")),
    *(f"schema {kind}" for kind in ("plan", "graph", "cluster", "error")),
    "schema plan --json", "schema result -o {folder}/out.json -> out.json",
    *(f"models {model}" for model in MODELS), *(f"models {model} --json" for model in MODELS[:3]),
    *(f"models alexnet --dump-graph {{folder}}/out.{form} -> out.{form}"
      for form in ("json", "txt", "dot", "svg")),
    *(f"clusters {machine}" for machine in MACHINES),
    *(f"methods {kind}" for kind in ("sharding", "schedule", "partition", "placement", "streams",
                                     "rtasks", "joint")),
    *(f"simulate {model} -c {machine} -q" for model in MODELS[:4] for machine in MACHINES[:3]),
    *(f"simulate {model} -c 2xA100 --json -q" for model in MODELS),
    "simulate alexnet -c {folder}/machine.toml --infer", "simulate gpt2 --seq 16 -c 2xA100 -b 4",
    "simulate gpt2 --decode --cache 64 -c 2xA100 -b 4 --json", "simulate gpt2@1+64 -c 2xA100 -b 4",
    "simulate alexnet -c 2xA100 --gantt", "simulate alexnet -c 2xA100 --execution eager",
    "simulate alexnet -c 2xA100 --trace {folder}/out.trace.json -> out.trace.json",
    "simulate alexnet -c 2xA100 --dump-graph {folder}/out.svg -> out.svg",
    "simulate gpt2 -c 8xA100 -b 16 --tp 2 --pp 2", "simulate gpt2 -c 8xA100 -b 16 --tp 2 --json",
    *(f"{command} {{folder}}/{plan}{more}" for plan in PLANS for command, more in (
        ("verify", ""), ("verify", " --json"), ("report", ""), ("report", " --json"),
        ("explain", " --time-limit 0.1"), ("explain", " --time-limit 0.1 --json"),
        ("simulate", ""), ("simulate", " --json"),
        ("report", " -o {folder}/out.html -> out.html"),
        ("report", " -o {folder}/out.svg -> out.svg"),
        ("report", " -o {folder}/out.txt -> out.txt"),
        ("report", " -o {folder}/out.trace.json -> out.trace.json"),
    )),
    "export {folder}/one.json --to deepspeed", "export {folder}/one.json --to deepspeed --json",
    "export {folder}/two.json --to torch-schedule -o {folder}/out.csv -> out.csv",
    "explain {folder}/one.json fc", "explain {folder}/one.json fc --json",
    "diff {folder}/one.json {folder}/one.json", "diff {folder}/one.json {folder}/one.json --json",
    *(f"plan alexnet -c {machine} -b 4 {QUICK}" for machine in ("1xA100", "2xA100")),
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --json",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --infer --objective latency",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} -o {{folder}}/out.json -> out.json",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --save {{folder}}/out.json -> out.json",
    f"plan {{folder}}/graph.json -c 2xA100 {QUICK} --pin dp=2",
    f"plan squeezenet1_1 -c 2xA100 -b 4 {QUICK} --devices 1,2 --workers 1 --price 2",
    f"plan squeezenet1_1 -c 2xA100 -b 4 {QUICK} --devices 1..2 --workers 1 --json"
    " -o {folder}/out.json -> out.json",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --price 2 --deadline 1h --steps 1000 --budget 9",
    f"compare squeezenet1_1 -c 1xA100 -b 4 {QUICK} --devices 1 --workers 1 --json",
    f"shard alexnet -c 2xA100 -b 4 {QUICK}", f"shard alexnet -c 2xA100 -b 4 {QUICK} --json",
    f"shard alexnet -c 2xA100 -b 4 {QUICK} --compare",
    f"shard {{folder}}/graph.json -c 2xA100 {QUICK} -o {{folder}}/out.json -> out.json",
    f"shard --graph alexnet -p 4 {QUICK}",
    f"partition alexnet -c 2xA100 -b 4 {QUICK}",
    f"partition alexnet -c 2xA100 -b 4 {QUICK} --json",
    f"partition alexnet -c 2xA100 -b 4 {QUICK} -o {{folder}}/out.json -> out.json",
    f"place alexnet -c malvik -b 4 --method heft {QUICK}",
    f"place alexnet -c malvik -b 4 --method heft {QUICK} --json",
    f"place alexnet -c malvik -b 4 --method heft {QUICK} -o {{folder}}/out.json -> out.json",
    f"place alexnet -c malvik -b 4 --method heft {QUICK} --page {{folder}}/out.html -> out.html",
    *(f"schedule {shape} --devices 2 --microbatches 2 {QUICK}"
      for shape in ("vshape", "kshape", "1f1b", "gpipe", "zb-h1")),
    f"schedule {{folder}}/two.json {QUICK}",
    f"schedule vshape --devices 2 --microbatches 2 {QUICK} --json",
    f"schedule vshape --devices 2 --microbatches 2 {QUICK} --csv {{folder}}/out.csv -> out.csv",
    f"schedule vshape --devices 2 --microbatches 2 {QUICK} --svg {{folder}}/out.svg -> out.svg",
    f"streams squeezenet1_1 --device analytic --method greedy {QUICK}",
    f"streams squeezenet1_1 --device analytic --method greedy {QUICK} --json",
    f"streams squeezenet1_1 --device analytic --method greedy {QUICK} -o {{folder}}/out.svg"
    " -> out.svg",
    *(f"rtasks {{folder}}/graph.json --method list {QUICK} -o {{folder}}/out.{form} -> out.{form}"
      for form in ("json", "txt", "svg", "trace.json", "problem.json")),
    f"rtasks {{folder}}/graph.json --method list {QUICK} --json",
    "simulate gpt2 --seq 2 --decode --cache 64 -c 2xA100 -b 4 -q",
    "simulate t5-small --decode --cache 64 -c 2xA100 -b 4 --json -q",
    "simulate {data}/hf/t5-small.json@1+16 -c 2xA100 -b 4 -q",
    "simulate {data}/hf/qwen2.5-0.5b.json --decode --cache 64 -c 2xA100 -b 8 -q",
    f"plan t5-small --decode --cache 16 -c 2xA100 -b 4 {QUICK} --json",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --forbid schedule=1f1b",
    f"plan alexnet -c 2xA100 -b 4 {QUICK} --pin pp=2 --pin cut=modules",
    f"plan alexnet -c 1xA100 -b 4 {QUICK} --forbid schedule=1f1b --forbid zero=1",
    f"plan {{folder}}/graph.json -c 2xA100 {QUICK} --pin pp=2 --pin schedule=gpipe --pin zero=3",
    f"plan {{folder}}/graph.json -c 2xA100 {QUICK} --pin pp=2 --forbid schedule=searched --json",
    f"plan {{folder}}/graph.json -c 2xA100 {QUICK} --pin tp=2 --pin recompute=full",
    "models {data}/hf/t5-small.json@1+16", "models t5-small@1+16 --json",
    *(f"export {{folder}}/two.json --to {target} -q"
      for target in ("torchtitan", "megatron", "deepspeed", "fsdp2", "torch-schedule")),
    "export {folder}/two.json --to torchtitan --json",
    "export {folder}/two.json --to megatron -o {folder}/out.args -> out.args",
    "export {folder}/two.json --to fsdp2 -o {folder}/out.py -> out.py",
    "emit {folder}/one.json -o {folder}/out.py -> out.py", "emit {folder}/one.json --rank 0",
    "emit {folder}/one.json --rank 1 -o {folder}/out.py -> out.py",
    "report {folder}/two.json -o {folder}/out.csv -> out.csv",
    "report {folder}/two.json -o {folder}/out.pickle -> out.pickle",
    "simulate {folder}/two.json --trace {folder}/out.trace.json -> out.trace.json",
    "validate {data}/validate/rows.json -q", "validate {data}/validate/rows.json --json -q",
    "validate {data}/validate/rows.json --page {folder}/out.html -q -> out.html",
    *(f"schema {kind}" for kind in ("forecast", "timeline", "trace-comparison", "placement")),
    f"solve {{data}}/partition/mlp.json --devices 2 {QUICK}",
    f"solve {{data}}/rtasks/lstm.json {QUICK} --json",
    f"solve {{data}}/schedule/vshape.infer.nd4.json {QUICK} --json",
    f"solve {{data}}/partition/mlp.json --devices 2 {QUICK} -o {{folder}}/out.json -> out.json",
    "emit {folder}/one.json --json",
    "emit {folder}/one.json --rank 0 --json", "emit {folder}/two.json --training --json",
    "experiment {folder}/experiment.toml --workers 1 --json -q",
    "profile {folder}/graph.json --repeats 1 --database {folder}/known.jsonl --json -q",
]  # fmt: skip

BAD: list[str] = [
    "plann", "plan", "plan alexnet", "plan nonsense -c 2xA100", "plan alexnet -c nonsense",
    "simulate gpt2 --decode -c 2xA100", "simulate alexnet --decode --cache 4 -c 2xA100",
    "simulate gpt2 --cache 1024 -c 2xA100", "plan gpt2@1+x -c 2xA100",
    "plan {folder}/machine.toml -c 2xA100",
    "plan alexnet -c 2xA100 -b 0", "plan alexnet -c 2xA100 --pin pp=3",
    "plan alexnet -c 2xA100 --pin nonsense=3", "plan alexnet -c 2xA100 --pin schedule=chimera",
    "plan alexnet -c 2xA100 --pin schedule=searched", "plan alexnet -c 2xA100 --seq 4",
    "plan alexnet -c 2xA100 --max-memory nonsense", "plan alexnet -c 2xA100 -o {folder}",
    "plan alexnet -c 2xA100 -o {folder}/no/plan.json",
    "plan alexnet -c 2xA100 -o {folder}/one.json",
    "plan alexnet -c 2xA100 --time-limit 0", "plan {folder}/missing.json -c 2xA100",
    "plan missing.py:make -c 2xA100", "plan missing.onnx -c 2xA100", "plan gpt2@0 -c 2xA100",
    "plan alexnet -c 2xA100 --devices 8..", "plan alexnet -c malvik --devices 1..2",
    "plan alexnet -c 2xA100 --price much", "plan alexnet -c 2xA100 --budget 5",
    "plan alexnet -c 2xA100 --deadline soon", "plan alexnet -c 2xA100 --results {folder}/r.jsonl",
    "compare alexnet -c 2xV100+2xP100 --devices 1..4",
    "shard alexnet", "shard --graph nonsense", "shard alexnet -c 2xA100 --method nonsense",
    "partition alexnet -c 2xA100 --method nonsense", "place alexnet",
    "place alexnet -c malvik --pin nonsense=0", "schedule nonsense", "schedule vshape --devices 0",
    "streams alexnet --device analytic -o {folder}/st.png", "rtasks alexnet -o {folder}/st.png",
    "rtasks alexnet --device nonsense", "solve {folder}/missing.json", "solve {folder}/one.json",
    "solve {folder}/broken.json", "simulate alexnet", "simulate alexnet -c 2xA100 --dtype nonsense",
    "simulate {folder}/one.json --schedule {folder}/missing.csv",
    "simulate alexnet -c 2xA100 --dump-graph {folder}/graph.png", "report {folder}/missing.json",
    "report {folder}/one.json -o {folder}/report.pdf", "report {folder}/graph.json",
    "verify {folder}/broken.json", "verify {folder}/empty.json", "verify {folder}/graph.json",
    "explain {folder}/one.json nonsense", "diff {folder}/one.json {folder}/broken.json",
    "diff {folder}/one.json {folder}/two.json", "emit {folder}/broken.json",
    "export {folder}/one.json", "export {folder}/one.json --to nonsense",
    "export {folder}/one.json --to megatron", "export {folder}/one.json --to torch-schedule",
    "export {folder}/one.json --to deepspeed --read {folder}/broken.json",
    "run {folder}/missing.json", "compare-trace {folder}/one.json {folder}",
    "validate {folder}/broken.json", "experiment {folder}/missing.toml", "models nonsense",
    "models gpt2@x", "clusters nonsense", "methods nonsense", "schema nonsense",
    "models alexnet --json --seed x", "profile nonsense",
    "serve nonsense", "serve --port 99999", "serve --port x",
    "accelerate nonsense",
    "run {folder}/one.json", "run {folder}/broken.json", "run {folder}/graph.json",
    "validate {folder}/missing.json", "validate {data}/validate/rows.json --group nonsense",
    "validate {data}/validate/rows.json --page {folder}/no/page.html",
    "validate {data}/validate/rows.json --page {folder}/one.json",
    "experiment {folder}/machine.toml", "experiment {folder}/broken.json",
    "emit {folder}/one.json --rank 7", "emit {folder}/two.json --rank 0",
    "emit {folder}/two.json --training -o {folder}/one.json",
    "emit {folder}/two.json -o {folder}/no/out.py",
    "compare-trace {folder}/missing.json {folder}", "compare-trace {folder}/broken.json {folder}",
    "simulate bert-base --decode --cache 4 -c 2xA100",
    "simulate {data}/hf/bert-base.json@1+4 -c 2xA100 --infer",
    "simulate t5-small@1+16 -c 2xA100 --train --tp 2",
    "plan {folder}/graph.json -c 2xA100 --seq 8", "plan alexnet -c 2xA100 --pin pp=1 --pin pp=2",
    "plan alexnet -c 2xA100 --pin schedule=gpipe --forbid schedule=gpipe",
    *(f"plan alexnet -c 2xA100 -b 4 --pin {pins}" for pins in (
        "pp=1 --pin schedule=1f1b", "pp=2 --pin vpp=2 --pin schedule=1f1b", "dp=4",
        "tp=2 --pin dp=2", "pp=2 --pin mesh=2", "hsdp=2 --pin zero=0", "micro-batch=3 --pin dp=2",
        "micro-batches=3", "zero=4", "recompute=some", "stages=2", "layers=2", "sp=perhaps", "ep=2",
        "cut=here", "execution=fast", "schedule=dualpipe", "shape=m --pin pp=1",
    )),
    "plan alexnet -c 1xA100 --pin schedule=1f1b", "plan alexnet -c 2xA100 --infer --pin vpp=2",
    "plan alexnet -c 2xA100 --infer --pin recompute=full",
    "plan alexnet -c 2xA100 --forbid zero=0 --forbid zero=1 --forbid zero=2 --forbid zero=3",
    "plan alexnet -c 2xA100 --forbid cut=modules --forbid cut=anywhere",
    "plan alexnet -c 2xA100 --forbid dp=1", "plan alexnet -c 2xA100 --forbid pp",
    "plan alexnet -c 2xA100 -o {folder}/plan.svg", "shard alexnet -c 2xA100 -o {folder}/plan.html",
    "partition alexnet -c 2xA100 -o {folder}/plan.png", "place alexnet -c malvik -o {folder}/p.pdf",
    "schedule vshape --devices 2 --microbatches 2 -o {folder}/s.csv",
    *(f"schedule vshape --devices 2 --microbatches 2 {words}" for words in (
        "--page {folder}/p.txt", "--svg {folder}/s.json", "--csv {folder}/s",
        "--trace {folder}/t.svg",
    )),
    "place alexnet -c malvik --page {folder}/p.txt",
    "validate {data}/validate/rows.json --page {folder}/p.svg",
    "solve {data}/partition/mlp.json --devices 2 -o {folder}/s.txt", "schema plan -o {folder}/s.py",
    *(f"models {{folder}}/{name}.json" for name in ("mystery-field", "other-family", "half-t5")),
    "simulate {folder}/half-t5.json -c 2xA100 -b 4", "models {data}/hf/t5-small.json --seq 0",
    "simulate {data}/hf/bert-base.json --seq 513 -c 2xA100",
]  # fmt: skip


def wrong(value: Any, schema: dict[str, Any], top: dict[str, Any], at: str = "$") -> list[str]:
    """What in a value is not as a schema says: the words that ours use, and no others."""
    if "$ref" in schema:
        return wrong(value, top["$defs"][schema["$ref"].rpartition("/")[2]], top, at)
    if "anyOf" in schema:
        each = [wrong(value, one, top, at) for one in schema["anyOf"]]
        return [] if [] in each else each[0]
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is_a(value, name) for name in types):
        return [f"{at} is {value!r:.40}, not {' or '.join(types)}"]
    faults = []
    if "pattern" in schema and not re.search(schema["pattern"], value):
        faults.append(f"{at} is {value!r}, not {schema['pattern']}")
    if isinstance(value, dict):
        faults += [
            f"{at} has no {name}" for name in schema.get("required", ()) if name not in value
        ]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            faults += [f"{at} has {name}"] if inner is False else []
            if isinstance(inner, dict):
                faults += wrong(item, inner, top, f"{at}.{name}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            places = schema.get("prefixItems", ())
            inner = places[number] if number < len(places) else schema.get("items", {})
            if isinstance(inner, dict):
                faults += wrong(item, inner, top, f"{at}[{number}]")
    return faults


def _is_a(value: Any, name: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and (isinstance(value, int) or value.is_integer())
    return {
        "string": isinstance(value, str), "number": number, "integer": whole,
        "boolean": isinstance(value, bool), "null": value is None,
        "array": isinstance(value, list), "object": isinstance(value, dict),
    }[name]  # fmt: skip
