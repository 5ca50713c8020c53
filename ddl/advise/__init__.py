"""`python -m ddl.advise`: does compression pay here, and which?

1. *Candidates* (`candidates.py`): compressors with their collectives.
2. *Situation* (`situation.py`): what a step consists of, on these workers: measured (`measured.py`,
   from `computation.py`, `probes.py` and `ddl.links`), or from published figures (`offline.py`).
3. *Predictions* (`predictions.py`): what a step comes to with each candidate; `advice.py` chooses.
4. *Trials* (`trials.py`): the same steps, run and timed, beside the predictions.
5. *Report*: `report.py` (table, JSON), `plot.py`.
"""
