"""A live page on this machine: move what a plan hangs on, see what becomes of it.

    browser ── app.py (one process, asyncio) ── workers.py ── worker.py (a process per question)

What is asked (`asks.py`) is a record with the command line that asks the same; what is answered
(`answers.py`) is figures, words and a view that `partita.report` draws.
"""
