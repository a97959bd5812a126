"""Reports: one self-contained page with curves, a comparison of runs, and a privacy certificate.

:func:`quietgrad.assurance.report.page.write_report` writes it.
"""
