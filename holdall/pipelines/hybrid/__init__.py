"""Models as rows of layers, ways to divide each of them over devices, and the price of a whole plan.

`layers.py` says what a layer takes, `strategies.py` what it takes on a group of devices, `plans.py` what a plan of stages then
takes: seconds by the pipelines' simulator, bytes of every rank. `decoders.py` makes layers by closed forms;
`holdall/analysis/over_meshes.py` makes them of a trace. `holdall/pipelines/searches` look for the best plan.
"""
