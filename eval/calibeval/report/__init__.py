"""What is made of many evaluations: tables, figures and a page; and of two, a verdict.

    index       which record files belong together, as rows and columns of tables
    tables      the tables of an index, with what is printed below them, and the page
    figures     reliability diagrams, and errors over β
    diagnosis   `check`: sentences about a model before and after fine-tuning

The functions here make the whole report of an index: `collect`, or `write` of what `index.read`
returned.
"""

from calibeval.report.tables import (
    collect,
    csv_table,
    main_table,
    plain_table,
    read_columns,
    tidy,
    write,
    write_page,
)

__all__ = [
    "collect",
    "csv_table",
    "main_table",
    "plain_table",
    "read_columns",
    "tidy",
    "write",
    "write_page",
]
