"""Models of what training costs: pure arithmetic, which knows nothing of the engine or of torch.

Costs: `costs` (collectives), `hardware` (links and devices by name). Iterations: `iteration`
(profiles and ratios), `dag` (a graph of tasks and its clock), `plans` (which layers travel
together), `schedules` (what overlaps what), `contention` (threads that share cores), `frameworks`
(the papers' four), `simulation` (many workers).
Measurements: `fits` on `regression`. Data: `networks` (layers), `published` (what others measured).
"""
