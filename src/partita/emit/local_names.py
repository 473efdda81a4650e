"""What the model's own code calls a value: the target of the statement that makes it.

`torch.export` keeps the line of every `forward` that was under way at an operator, one for each
module around it. The statement that stands there says what the person who wrote the model calls
the result, and which operators are one expression. Ops of a graph of the zoo have names of their
own instead, which are turned into nouns.
"""

import ast
import functools
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

from partita.emit.names import variable

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_REPEATS = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# What layers of these names make: said of any layer, and of layers that have such a role that
# their result deserves a name of its own.
_ROLES = {
    "query": r"(c_)?q(uery)?(_?proj|_?states)?|wq",
    "key": r"(c_)?k(ey)?(_?proj|_?states)?|wk",
    "value": r"(c_)?v(alue)?(_?proj|_?states)?|wv",
    "qkv": r"(in_proj_?)?qkv(_?proj)?|c_attn|query_key_value",
    "gate": r"gate(_?proj)?|in_proj_gate",
    "up": r"up(_?proj)?",
    "router_logits": r"router",
    "attn_out": r"(self_?|cross_?|encoder_|encdec)?att(entio)?n|selfattention|sdpa"
    r"|scaled_dot_product_attention",
    "mlp_out": r"mlp|feed_?forward|ffn?|densereludense|dense_relu_dense|block_sparse_moe|experts",
    "positions": r"wpe|position_(ids|embeddings?)|embed_positions",
    "embedded": r"wte|(word_|token_)?embed(ding|dings|ded|_in|_tokens)?",
    "logits": r"lm_head|classifier|logits|head",
    "loss": r"loss|cross_entropy(_loss)?|mse_loss|nll_loss",
    "mask": r"(causal_|attention_)?mask|eq|ne|lt|le|gt|ge|(bitwise|logical)_(and|or|not)",
}
_PLAIN = {
    "normed": r"(.*_)?(layer_?|rms_?|batch_?|group_?|instance_?)?norm(alization)?\d*|ln_?\w?|bn\d*"
    r"|(pre|post|input|final).*norm",
    "hidden": r"(layers?|blocks?|h|block_\w+|encoder|decoder|stages?)\d*|.*residual|backbone|model",
    "product": r"matmul|bmm|mm|baddbmm|einsum|mul",
    "weights": r"softmax|_softmax",
    "joined": r"cat|concat|stack",
    "projected": r"linear|addmm|(o|out|c|dense|output)_?proj|proj|dense|c_fc|fc\d*",
    "activated": r"relu|gelu|silu|tanh|sigmoid|elu|mish|swiglu|act(ivation)?|.*_activation",
    "dropped": r"drop(out)?\d*|native_dropout",
    "features": r"conv\w*|features|(.*_)?pool\w*",
    "total": r"add|sum",
    "scaled": r"div|scale",
    "part": r"slice|select|index|getitem|narrow",
    "parts": r"split\w*|chunk|unbind",
    "positions": r"arange",
}


@dataclass(frozen=True, slots=True)
class Sentence:
    """A statement: which one it is, the names that it gives, and what else it tells.

    `renamed` are plain assignments `residual = x` of the function around it, as (x, residual).
    """

    key: tuple[str, int]
    targets: tuple[str, ...] = ()
    repeats: bool = False  # it may run several times within one call
    is_code: bool = True  # a person wrote it; else it is the name of an op
    renamed: tuple[tuple[str, str], ...] = ()


def sentence_at(file: str, line: int) -> Sentence | None:
    """The statement of a source file around a line."""
    best = None
    for first, last, sentence in _sentences(file):
        if first <= line <= last and (best is None or first >= best[0]):
            best = (first, sentence)
    return best[1] if best else None


def named_sentence(name: str) -> Sentence:
    """What the name of an op or of a module says."""
    return Sentence((name, 0), (noun(name),), is_code=False)


def noun(name: str) -> str:
    """What something of this name makes: `query` for `h.3.attn.q_proj`."""
    parts = name.split(".")
    last = next((part for part in reversed(parts) if not part.isdigit()), "block")
    if parts[-1].isdigit() and parts[-1] != name and re.fullmatch(_PLAIN["hidden"], last):
        return "hidden"
    return role(last) or _of(_PLAIN, last) or variable(last)


def role(name: str) -> str | None:
    """The role of a layer, if its name tells one."""
    return _of(_ROLES, name.rpartition(".")[2])


def _of(table: dict[str, str], name: str) -> str | None:
    lowered = name.lower()
    return next((word for word, names in table.items() if re.fullmatch(names, lowered)), None)


@functools.lru_cache(maxsize=256)
def _sentences(file: str) -> tuple[tuple[int, int, Sentence], ...]:
    """First line, last line and meaning of every simple statement of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # no Python, or not for this version: names are made up then
    return tuple(_under(tree, file, (), repeats=False))


def _under(
    node: ast.AST, file: str, renamed: tuple[tuple[str, str], ...], repeats: bool
) -> Iterator[tuple[int, int, Sentence]]:
    for child in ast.iter_child_nodes(node):
        inner = renamed
        if isinstance(child, _FUNCTIONS):
            inner = tuple(_renamed(child))
        again = isinstance(child, _LOOPS) or (repeats and not isinstance(child, _FUNCTIONS))
        if isinstance(child, ast.stmt) and not hasattr(child, "body"):
            many = again or any(isinstance(part, _REPEATS) for part in ast.walk(child))
            sentence = Sentence((file, child.lineno), _targets(child), many, renamed=inner)
            yield child.lineno, child.end_lineno or child.lineno, sentence
        else:
            yield from _under(child, file, inner, again)


def _renamed(function: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield variable(node.value.id), variable(target.id)


def _targets(statement: ast.stmt) -> tuple[str, ...]:
    """`("q", "k")` of `q, k = ...`; an empty name for what is no plain one."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        target = statement.target
    else:
        return ()
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return tuple(_plain(part) for part in parts)


def _plain(target: ast.expr) -> str:
    name = ""
    if isinstance(target, ast.Name):
        name = target.id
    elif isinstance(target, ast.Attribute):
        name = target.attr
    return "" if name.strip("_") == "" else variable(name)
