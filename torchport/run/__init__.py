"""Running what was traced: a pair of cursor and live values becomes a plan, a plan a job, a job's results values.

In the order data flows: ``flush`` with ``split`` and ``plans`` (which computation brings which values) → ``jobs``
(runs, now or on ``queue``) → ``future`` (values in flight) → ``values`` (what a handle comes to). ``replay`` runs a
failed job's operators one by one, ``walk`` a single operator, ``barriers`` an operator that no graph can hold.
``reasons`` and ``history`` are for people. ``device_runtime`` holds what belongs to one device index, ``sync`` ends a
step, and ``step_closures`` are called then.
"""
