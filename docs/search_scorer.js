// How Sphinx' search ranks pages: guides before the changelog, and of the pages
// that have all words, first those with most of the words in their title.
// The numbers are Sphinx' own, but for `score`.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind !== "text") return score;
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().match(/\w{3,}/g) || [];
    const inTitle = words.filter((word) => title.toLowerCase().includes(word));
    const isForUsers = !/^C|benchmarks|design/.test(page);
    return score + 5 * inTitle.length - (isForUsers ? 0 : 10);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
