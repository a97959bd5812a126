"""Institutions that train together: a federation simulated in one process, or run for real from one TOML plan.

The front end of :mod:`quietgrad.federation`, whose protocols know nothing of algorithms: ``simulation`` (all
parties in one process), ``toml_plan`` and ``network`` (real members over TLS), ``flare`` and ``flare_job`` (real
sites on NVIDIA FLARE), ``dealing`` (one table split among parties) and ``printed_average`` (paper 002's Algorithm
1 as printed).
"""
