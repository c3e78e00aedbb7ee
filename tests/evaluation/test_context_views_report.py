"""Recurrence, remembrance and the cache of counts as tables and panels."""

from evaluation.reports import LINEAR, VIEWED

from lmlong.evaluation.perplexity_figure import figure
from lmlong.evaluation.perplexity_report import table
from lmlong.report.plot import draw

EXPECTED = """\
viewed
  1,000 parameters, at length 512
  state of 577 numbers, 2 KB; precision 32
  documents in 2 clusters by author: the errors are over clusters
  1,000 tokens read in 0.5 s (2,000 a second), 1 MB at most

by recurrence: nats/token by how many tokens back the same token last occurred
  length       never        < 64       < 512        < 4k       < 32k      beyond
  tokens       2,000       2,000       2,000       2,000           0           0
     256      6.1000      2.1000      3.0000      4.0000           -           -
      4k      6.1000      2.1000      2.9500      3.6000           -           -
  change     +0.0000     +0.0000     -0.0500     -0.4000           -           -
       ±      0.0000      0.0000      0.0500      0.1000           -           -

by recurrence: nats/token by how many tokens back the same word last occurred
  length       never        < 64       < 512        < 4k       < 32k      beyond
  tokens       2,000       2,000       2,000       2,000           0           0
     256      6.1000      2.1000      3.0000      4.0000           -           -
      4k      6.1000      2.1000      2.9500      3.6000           -           -
  change     +0.0000     +0.0000     -0.0500     -0.4000           -           -
       ±      0.0000      0.0000      0.0500      0.1000           -           -

remembrance: how far the text before a point changes the predictions, as KL
from those with 4k tokens before, in nats/token
  text back to   divergence        ±
           256      0.02500  0.00500

cache baseline: nats/token that counts of bigrams and trigrams (and unigrams)
add to the model, among the tokens it reads (context), or among all before
  length   context       ±  +unigram       ±  document       ±  +unigram       ±
     256   +0.1500  0.0500   +0.1500  0.0500   +0.1500  0.0500   +0.1500  0.0500
      4k   +0.2500  0.0500   +0.2500  0.0500   +0.2500  0.0500   +0.2500  0.0500"""


def test_the_tables() -> None:
    assert table([VIEWED]) == EXPECTED


def test_there_is_a_panel_for_each_view_in_rows_of_three() -> None:
    drawn = draw(figure([VIEWED]))
    token, word, remembrance, cache = drawn.axes
    assert [axes.get_title() for axes in (token, word)] == ["same token last seen", "same word last seen"]
    lines = {line.get_label(): list(line.get_ydata()) for line in token.lines}
    assert list(lines) == ["never", "< 64", "< 512", "< 4k"]  # those without targets are no lines
    assert [round(value, 6) for value in lines["< 4k"]] == [0, -0.4]
    assert list(remembrance.lines[0].get_ydata()) == [0.025]
    assert [len(line.get_ydata()) for line in cache.lines] == [2, 2]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["viewed"]
    assert len(draw(figure([LINEAR, VIEWED])).axes) == 7
