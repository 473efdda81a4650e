"""A number of a captured program that follows the batch or the length."""


class Size(int):
    """A size of the captured program, and what it is a multiple of; it counts as its number."""

    symbols: tuple[str, ...]
    factor: int
    more: int

    def __new__(cls, value: int, symbols: tuple[str, ...], factor: int, more: int = 0) -> "Size":
        """The number `value`, which is factor x symbols + more."""
        size = super().__new__(cls, value)
        size.symbols, size.factor, size.more = symbols, factor, more
        return size

    @property
    def text(self) -> str:
        """`batch`, `32 * batch`, `length + 1`."""
        return self.of(" * ".join(self.symbols))

    def of(self, symbols: str) -> str:
        """The same with other words for the product of its symbols."""
        product = f"{self.factor} * {symbols}" if self.factor != 1 else symbols
        if not self.more:
            return product
        return f"{product} {'+' if self.more > 0 else '-'} {abs(self.more)}"
