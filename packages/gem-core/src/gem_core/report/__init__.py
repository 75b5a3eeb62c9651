"""Reports over finished runs: self-contained HTML with plots, and Markdown, from the JSON in the runs' folders.

runs = [load_run("runs/kunlun"), load_run("runs/din")]
write(build("Kunlun against DIN", "our log, March", runs, {}), Path("report"))
"""

from gem_core.report.document import Code, Document, Facts, Items, Plot, Section, Text
from gem_core.report.run import Run, load_run
from gem_core.report.write import build, write

__all__ = ["Code", "Document", "Facts", "Items", "Plot", "Run", "Section", "Text", "build", "load_run", "write"]
