"""The engine of clipped sums: Σ clip_C(gᵢ) of a torch module at about the cost of an ordinary gradient.

    RecordGroup    records of one shape, stacked: each is what ``collate([record])`` gives          records.py
        ↓          model and loss are called for one record
    RecordProgram  runs that program for many records at once (vmap), or one by one                 one_record.py
        ↓          before every pass, all that it could have kept is put back                       program_state.py
    Taps           see its operations; at each that meets a parameter, a *site* keeps what went in  taps.py
        ↓          and, on the way back, what came back                                             operations.py
    Collector      gathers the sites of a pass; a kernel makes per-example vectors of each          gradients.py
        ↓          stored, or as factors, whichever is cheaper                                      kernels.py
    norms          ‖gᵢ‖ over all sites, in float64                                                  vectors.py
        ↓          weights min(1, C/‖gᵢ‖)                                                           engine.py
    clipped sum    Σ wᵢ gᵢ, one weighted product for each site, added to the session's sum          module.py

``PerExampleEngine.add`` is all of it, and ``ModuleObjective.add`` is what a query calls. One worked example, step
by step: two records of a linear layer, whose gradients are (3, 4) and (0.1, 0).

>>> import numpy as np, torch
>>> from quietgrad.torch.networks.gradients import GRADIENT, Collector
>>> from quietgrad.torch.networks.one_record import RecordProgram, go_back
>>> from quietgrad.torch.networks.randomness import RecordSeeds
>>> from quietgrad.torch.networks.records import RecordGroup
>>> from quietgrad.torch.networks.vectors import Workspace
>>> module = torch.nn.Linear(2, 1, bias=False)
>>> group = RecordGroup(np.arange(2), (torch.tensor([[[3.0, 4.0]], [[0.1, 0.0]]]),))   # (records, batch of one, 2)
>>> program = RecordProgram(module, {"weight": slice(0, 2)})
>>> params, seeds = {"weight": torch.ones(1, 2, requires_grad=True)}, RecordSeeds(bytes(32), np.arange(2))
>>> (run,) = program.passes(lambda record: module(record[0]).sum(), params, group.record, seeds)
>>> [(site.operation, site.names) for site in run.sites]           # where the parameter met the records
[('linear', ('weight',))]
>>> collector = Collector(GRADIENT, Workspace(1e6, torch.empty(0)), count=2)
>>> collector.begin(run.sites)
>>> go_back(run.outputs)                                            # no gradient by a parameter is formed
>>> collector.end(run.sites)
>>> (gradients,) = collector.gradients()
>>> norms = gradients.norms()
>>> [round(float(norm), 3) for norm in norms]
[5.0, 0.1]
>>> total = torch.zeros(2, dtype=torch.float64)
>>> gradients.add_weighted((1.0 / norms).clamp(max=1.0), total)     # C = 1
>>> [round(float(number), 3) for number in total]
[0.7, 0.8]
"""
