"""Regions as one kernel: the table of tasks, the generated source, and what every kind computes."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from in_interpreter import in_a_process, in_interpreter  # noqa: E402
from rtasks_cases import CASES, Arena, program_of, run_cases  # noqa: E402

from partita.errors import ProblemError  # noqa: E402
from partita.gpu.rtasks.generate import Source  # noqa: E402
from partita.gpu.rtasks.table import WIDTH, launch_table, task_queues  # noqa: E402
from partita.gpu.rtasks.tileops import Place, Tile, TileOp, num_tiles, rectangle, tiles  # noqa: E402
from partita.problems.rprogram import Instruction, RProgram  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_tiles_of_every_shape_cover_the_output_once(case):
    for op in case(Arena())[0]:
        out = op.writes[0]
        for tile in tiles(op):
            seen = [
                (row, col)
                for index in range(num_tiles(op, tile))
                for row in rectangle(op, tile, index)[0]
                for col in rectangle(op, tile, index)[1]
            ]
            assert len(seen) == len(set(seen)) == out.rows * out.cols


def test_ops_that_differ_only_in_their_places_share_a_branch():
    arena = Arena()
    weights = [arena.place(16, 16) for _ in range(3)]
    values = [arena.place(1, 16) for _ in range(4)]
    ops = [
        TileOp(f"l{i}", "gemv", (values[i],), (values[i + 1],), (weights[i],), (-1,),
               (("act", "relu"),))
        for i in range(3)
    ]  # fmt: skip
    tile = Tile(1, 4, 16)
    source = Source(ops, [tile] * 3)
    assert source.codes == (0, 0, 0)
    assert Source(ops, [tile, tile, Tile(1, 8, 16)]).codes == (0, 0, 1)
    assert source.text.count("K.gemv(") == 1
    compile(source.text, "region", "exec")


def test_a_task_of_the_table_knows_its_waits_its_counter_and_its_operands():
    arena = Arena()
    ops, edges, _ = CASES[0](arena)
    chosen = [Tile(1, 64, 8), Tile(1, 64, 8)]
    program = program_of(ops, chosen, edges, units=1)
    table = launch_table(ops, (7, 9), program)
    rows = table.rows
    assert table.starts[-1] == 3
    assert [len(row) for row in rows] == [WIDTH] * 4  # and one to read ahead
    assert table.waits == ()
    last = next(row for row in rows if row[0] == 9)
    assert (last[3], last[20:22]) == (1, (0, 2))
    assert last[4] == -1  # nobody waits for it
    assert sorted(row[4] for row in rows if row[0] == 7) == [0, 0]
    assert last[5] == ops[1].reads[0].at // 8
    assert last[6] == ops[1].reads[1].at // 8
    assert last[16] == ops[1].writes[0].at // 8


def test_waits_beyond_six_lie_outside_of_the_row():
    arena = Arena()
    values = [arena.place(1, 8) for _ in range(9)]
    steps = (("relu", "r0"),)
    ops = [
        TileOp(f"v{i}", "chain", (values[8],), (values[i],), attrs=(("steps", steps),))
        for i in range(8)
    ]
    ops.append(replace(ops[0], name="last", reads=(values[0],), writes=(values[8],)))
    tile = Tile(8, 32)
    program = program_of(ops, [tile] * 9, [(i, 8) for i in range(8)], units=8)
    table = launch_table(ops, (0,) * 9, program)
    last = next(row for row in table.rows if row[3] > 0)
    assert last[3] == 7  # it runs where one of the eight ran
    assert last[2] == 0
    assert len(table.waits) == 1
    assert len(set(table.pairs(last))) == 7


def test_a_wait_for_one_tile_is_refused():
    run, wait = Instruction("run", 0, 0), Instruction("wait", 0, 1)
    program = RProgram(("a",), (2,), ((wait, run), (replace(run, tile=1),)))
    with pytest.raises(ProblemError, match="waits for one tile"):
        task_queues(program)


def test_places_lie_in_eights():
    with pytest.raises(ValueError, match="eights"):
        Place(4, 1, 8, 8)


def test_an_op_without_its_attributes_is_refused():
    with pytest.raises(ValueError, match="attributes"):
        TileOp("x", "gemv", (), (), ())


def test_every_kind_computes_what_pytorch_does_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    code = (
        "import torch; from rtasks_cases import run_cases; "
        "run_cases('cpu', torch.float32, 1e-5); print('all right')"
    )
    said = in_interpreter(code, XDG_CACHE_HOME=str(tmp_path))
    assert said == "all right\n"


def test_a_task_before_what_it_waits_for_is_caught_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    code = """
import torch
from partita.errors import VerificationError
from partita.gpu.rtasks.region import Region
from partita.gpu.rtasks.tileops import tiles
from rtasks_cases import CASES, Arena, program_of, region_of
arena = Arena()
ops, edges, _ = CASES[0](arena)
chosen = [tiles(op)[-1] for op in ops]
program = program_of(ops, chosen, edges)
region = Region(region_of(ops), chosen, program, *arena.build(torch.float32, "cpu"))
region.table[:-1] = region.table[:-1].flip(0)
try:
    region()
except VerificationError as caught:
    print(caught)
"""
    said = in_interpreter(code, XDG_CACHE_HOME=str(tmp_path))
    assert "before what it waits for" in said


TANH = """
import torch, triton
import triton.language as tl
from partita.gpu.kernels.tiles import tanh

@triton.jit
def each(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tanh(tl.load(x + at)))

size = torch.logspace(-12, 1.3, 512)
x = torch.cat([size, -size])
y = torch.empty_like(x)
each[(1,)](x, y, 1024)
exact = torch.tanh(x.double())
print(float(((y - exact) / exact).abs().max()))
"""


def test_a_small_tanh_has_all_its_digits(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "small.py"  # Triton reads the source of a kernel from a file
    file.write_text(TANH)
    said = in_interpreter(f"import runpy; runpy.run_path({str(file)!r})")
    assert float(said) < 4e-7


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from partita.gpu.rtasks.generate import Source
from partita.gpu.rtasks.tileops import tiles
from rtasks_cases import CASES, Arena
names = ("data", "wide", "table", "starts", "waits", "flags", "state")
for number, case in enumerate(CASES):
    ops = case(Arena())[0]
    for kind in (("fp16", "bf16")[number % 2], "fp32"):  # halves differ by their name alone
        region = Source(ops, [tiles(op)[-1] for op in ops]).module().region
        types = ["*" + kind, "*fp32", *["*i32"] * 5]
        fixed = {"NUM": 264, "SPIN": True, "DELAY": 0}
        signature = dict(zip(names, types)) | dict.fromkeys(fixed, "constexpr")
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(names))}
        made = triton.compile(
            ASTSource(region, signature, fixed, aligned), target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )
        text = made.asm["ptx"]
        assert "ld.acquire.gpu" in text, "no acquire"
        assert "atom.global.gpu.release" in text or "atom.release.gpu" in text, "no release"
print("all right")
"""


def test_every_kind_compiles_for_a_hopper_gpu_without_having_one(tmp_path):
    pytest.importorskip("triton")
    said = in_a_process(
        COMPILE, XDG_CACHE_HOME=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton")
    )
    assert said == "all right\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
)
def test_every_kind_computes_what_pytorch_does_on_a_gpu(dtype, tolerance):
    run_cases("cuda", dtype, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_signals_that_come_late_by_chance_change_nothing_on_a_gpu():
    run_cases("cuda", torch.float32, 1e-5, launches=100, delay=500)
