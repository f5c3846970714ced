"""One HTML page about runs: curves, bytes and quality, where the bytes went, time, samples, recipes, significance.

runs ─► sections.sections ─► page.render ─► report.html
          │    │    └── sizes       streams of an artifact
          │    └── figures           SVG by matplotlib
          └── samples                text of the decoded model
"""
