"""One computation for several sizes: what differs between graphs of one form, and how it is compiled once.

A program whose lengths or batches vary gives graphs that are equal but for integers. :mod:`.form` compares such graphs
and expresses every integer by the sizes of their inputs; :mod:`.symbolic` writes the graph whose sizes are symbols;
:mod:`.families` remembers the graphs that were seen, and decides; :mod:`.sized` runs one computation for other sizes,
and :mod:`.padded` does so for backends without symbolic sizes, by padding where that is exact.

Nothing is assumed of a size that was not seen: the graph of each new set of sizes is compared, integer by integer, with
what the form says.
"""
