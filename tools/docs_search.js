// Asks the search of the built site ten questions, as its search page would.
//
//     node tools/docs_search.js build/docs
//
// The page that answers a question must be among the first three hits.
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const QUESTIONS = {
  "How do I accumulate gradients?": "docs/updates",
  "learning rate for each group": "docs/groups",
  "resume after a crash": "docs/saving",
  "train on several machines": "docs/multi_worker",
  "Horovod": "docs/coming_from",
  "mixed precision": "docs/updates",
  "embedding table": "docs/embeddings",
  "early stopping": "docs/callbacks",
  "old TensorFlow 1 checkpoint": "docs/migration",
  "Which versions of Keras?": "docs/limits",
};

const site = process.argv[2];
const page = vm.createContext({
  SPHINX_HIGHLIGHT_ENABLED: false,
  URLSearchParams,
  location: {},
  _: (text) => text,
  _ready: () => {},
  document: { getElementById: () => null },
});
page.window = page; // As in a browser.
const scripts = fs
  .readFileSync(path.join(site, "search.html"), "utf8")
  .matchAll(/<script src="([^"?]*)/g);
for (const [, script] of scripts) {
  if (/(stemmer|searchtools|language_data|searchindex)\.js$/.test(script)) {
    const file = path.join(site, script);
    vm.runInContext(fs.readFileSync(file, "utf8"), page, { filename: file });
  }
}

let failures = 0;
for (const [question, answer] of Object.entries(QUESTIONS)) {
  page.question = question;
  page.location.search = `?${new URLSearchParams({ q: question })}`;
  const hits = vm.runInContext(
    "Search._performSearch(...Search._parseQuery(question))",
    page,
  );
  const first = hits.slice(-3).map(([name]) => name); // The best one is last.
  if (!first.includes(answer)) {
    failures++;
    console.error(`"${question}" finds ${first.reverse()}, not ${answer}`);
  }
}
process.exit(failures ? 1 : 0);
