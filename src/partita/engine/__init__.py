from partita.simulate.engine import run
__all__=["run"]
