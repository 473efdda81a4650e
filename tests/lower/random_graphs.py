"""Random small models: several consumers, skips, tied parameters, several outputs, odd corners.

Tensors are [batch, positions, width] or [batch, width], so that every op has something to read.
"""

from dataclasses import replace

from partita.graph import GraphBuilder, training_graph
from partita.graph.record import Graph

BATCH, POSITIONS, WIDTH, VOCABULARY = 4, 4, 8, 8
WIDE = 0.25  # of graphs that train
UNARY = ("relu", "tanh", "gelu", "sigmoid", "dropout", "scale", "silu")


def random_graph(random, *, most_ops=10):
    """A forward graph whose first output depends on a parameter."""
    return _Draw(random).graph(random.randint(3, most_ops))


def in_half(graph):
    """The same graph in bf16."""
    tensors = tuple(
        replace(tensor, dtype="bf16") if tensor.dtype in ("f32", "f64") else tensor
        for tensor in graph.tensors
    )
    return Graph(graph.name, tensors, graph.ops, graph.outputs)


def random_training(random, forward, optimizer="adamw"):
    """With its backward; in some, gradients are added up in a wider type than the parameters'."""
    if random.random() < WIDE:
        return training_graph(in_half(forward), optimizer, grad_dtype="f32")
    return training_graph(forward, optimizer)


class _Draw:
    def __init__(self, random):
        self.random = random
        self.g = GraphBuilder("drawn", random.choice(["f32", "f32", "bf16"]))
        self.weights = {}  # shape -> parameters, to be read again
        self.number = 0
        self.outputs = []

    def graph(self, num_ops):
        g, random = self.g, self.random
        self.shape = (BATCH, POSITIONS, WIDTH) if random.random() < 0.7 else (BATCH, WIDTH)
        self.known = [g.input("x", self.shape)]
        if random.random() < 0.5:
            ids = g.input("ids", self.shape[:-1], "i64")
            table = self.parameter((VOCABULARY, WIDTH))
            self.known.append(g.lookup(ids, table))
        if random.random() < 0.2:
            self.known.append(g.one("constant", name="constant", shape=self.shape))
        steps = [
            self.linear, self.linear, self.unary, self.unary, self.added, self.multiplied,
            self.halves, self.concatenated, self.normed, self.reshaped, self.computed_weight,
            self.parameter_added, self.softmax, self.attended, self.product, self.stopped,
            self.sliced, self.reduced, self.twice,
        ]  # fmt: skip
        while len(g._ops) < num_ops:
            random.choice(steps)()
        return self.finish()

    def finish(self):
        g, random = self.g, self.random
        last = g.add(self.known[-1], self.known[0])  # a model depends on what it is fed
        for other in self.known[1:-1]:  # most dangling tensors are joined, some are not
            if random.random() < 0.3:
                last = g.add(last, other)
        head = g.one("linear", last, self.parameter((VOCABULARY, WIDTH)), name="head")
        ends = [head]
        kind = random.choice(["classes", "distance", "given"])
        if kind == "classes":
            targets = g.input("targets", self.shape[:-1], "i64")
            ends = [g.cross_entropy(head, targets), *random.choice([[], [head]])]
        elif kind == "distance":
            ends = [g.one("mse_loss", head, g.input("targets", head.shape), name="loss")]
        extra = [t for t in self.known[1:] if random.random() < 0.15]
        if random.random() < 0.2:
            g.parameter("nobody", (WIDTH,))  # a parameter that no op reads
        return g.finish(*dict.fromkeys((*ends, *extra)))

    def pick(self):
        return self.random.choice(self.known[-4:])

    def parameter(self, shape):
        """A new parameter, or one that is read already."""
        pool = self.weights.setdefault(shape, [])
        if pool and self.random.random() < 0.35:
            return self.random.choice(pool)
        self.number += 1
        pool.append(self.g.parameter(f"p{self.number}.weight", shape))
        return pool[-1]

    def linear(self):
        weights = [self.parameter((WIDTH, WIDTH))]
        if self.random.random() < 0.5:
            weights.append(self.parameter((WIDTH,)))
        self.known.append(self.g.one("linear", self.pick(), *weights, name="linear"))

    def unary(self):
        self.known.append(self.g.elementwise(self.random.choice(UNARY), self.pick()))

    def added(self):
        self.known.append(self.g.add(self.pick(), self.pick()))

    def multiplied(self):
        self.known.append(self.g.mul(self.pick(), self.pick()))

    def twice(self):
        x = self.pick()
        kind = self.random.choice(["add", "mul", "scores"])
        if kind != "scores":
            self.known.append(self.g.elementwise(kind, x, x))
        elif len(self.shape) == 3:
            self.known.append(self.g.matmul(self.g.matmul(x, x, transpose_b=True), x))

    def halves(self):
        half = WIDTH // 2
        a, b = self.g.split(self.pick(), (half, half), axis=len(self.shape) - 1)
        if self.random.random() < 0.5:
            a = self.g.elementwise("tanh", a)
        self.known.append(self.g.concat([b, a], axis=len(self.shape) - 1))

    def concatenated(self):
        wide = self.g.concat([self.pick(), self.pick()], axis=len(self.shape) - 1)
        weight = self.parameter((WIDTH, 2 * WIDTH))
        self.known.append(self.g.one("linear", wide, weight, name="narrow"))

    def normed(self):
        kind = self.random.choice(["layer_norm", "rms_norm"])
        weights = [self.parameter((WIDTH,))]
        if kind == "layer_norm" and self.random.random() < 0.7:
            weights.append(self.parameter((WIDTH,)))
        self.known.append(self.g.one(kind, self.pick(), *weights, name="norm"))

    def reshaped(self):
        if len(self.shape) == 3 and self.random.random() < 0.5:
            y = self.g.transpose(self.pick(), (0, 2, 1))
            weight = self.parameter((POSITIONS, POSITIONS))
            y = self.g.one("linear", y, weight, name="across")
            self.known.append(self.g.transpose(y, (0, 2, 1)))
            return
        x = self.g.reshape(self.pick(), (*self.shape[:-1], 2, WIDTH // 2))
        self.known.append(self.g.reshape(self.g.elementwise("tanh", x), self.shape))

    def computed_weight(self):
        weight = self.g.elementwise("tanh", self.parameter((WIDTH, WIDTH)))
        self.known.append(self.g.one("linear", self.pick(), weight, name="linear"))

    def parameter_added(self):
        join = self.random.choice([self.g.add, self.g.mul])
        self.known.append(join(self.pick(), self.parameter((WIDTH,))))

    def softmax(self):
        self.known.append(self.g.softmax(self.pick()))

    def attended(self):
        if len(self.shape) == 3:
            q, k, v = self.pick(), self.pick(), self.pick()
            causal = self.random.random() < 0.5
            self.known.append(self.g.attention(q, k, v, 2, causal=causal))

    def product(self):
        if len(self.shape) == 3:
            scores = self.g.matmul(self.pick(), self.pick(), transpose_b=True)
            self.known.append(self.g.matmul(scores, self.pick()))

    def stopped(self):
        y = self.g.elementwise("tanh", self.pick(), detach=True)
        self.known.append(self.g.add(y, self.pick()))

    def sliced(self):
        axis = len(self.shape) - 1
        half = self.g.one("slice", self.pick(), name="slice", axis=axis, start=2, stop=6)
        before = (*(0,) * axis, 1)
        after = (*(0,) * axis, WIDTH - 5)
        self.known.append(self.g.one("pad", half, name="pad", before=before, after=after))

    def reduced(self):
        fn = self.random.choice(["sum", "mean", "max"])
        axes = (len(self.shape) - 1,)
        small = self.g.one("reduce", self.pick(), name="reduce", fn=fn, axes=axes, keepdim=True)
        self.known.append(self.g.add(self.pick(), small))
