"""How good an answer is: 0.9 · F1 + 0.1 · format."""

import re
import string
from collections import Counter
from collections.abc import Mapping

F1_SHARE, FORMAT_SHARE = 0.9, 0.1
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(task: Mapping, output: object) -> dict[str, float]:
    """The reward and its two parts; all in [0, 1].

    The format is right if the output has exactly one `<answer>…</answer>` with something in it.
    Only that counts as the answer; of several right answers the one that fits best.

    >>> score({"answer": "Velto", "aliases": ["the city"]}, "<answer>The City.</answer>")
    {'reward': 1.0, 'f1': 1.0, 'format': 1.0}
    """
    tagged = _TAGGED.findall(output) if isinstance(output, str) else []
    if len(tagged) != 1 or not tagged[0].strip():
        return {"reward": 0.0, "f1": 0.0, "format": 0.0}
    best = max(f1(tagged[0], right) for right in (task["answer"], *task.get("aliases", ())))
    return {"reward": F1_SHARE * best + FORMAT_SHARE, "f1": best, "format": 1.0}


def f1(answer: str, right: str) -> float:
    """Overlap of the words of two answers: harmonic mean of precision and recall.

    Source: the evaluation scripts of SQuAD (P. Rajpurkar et al., 2016) and of MuSiQue (H. Trivedi
    et al., 2022), which count two answers without words as equal.

    >>> f1("in Rome, Italy", "Rome")
    0.5
    """
    said, wanted = normalise(answer).split(), normalise(right).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space.

    >>> normalise(" The Beatles'  U.S. tour ")
    'beatles us tour'
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())
