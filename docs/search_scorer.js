// How Sphinx' search ranks pages: reference and guides before the changelog.
// The numbers are Sphinx' own, but for `score`.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    if (page.startsWith("docs/api/")) return score + 5;
    return page === "CHANGELOG" || page === "CONTRIBUTING" ? score - 50 : score;
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
