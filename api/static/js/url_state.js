/** The state of a view that its URL holds: in the query on the server's page, behind `#` in a report. */

/**
 * Returns the state in the query of the page's URL.
 * @param {function(string)} navigate opens a URL of the page without loading the page anew
 * @returns {{get: function(string): ?string, href: function(Object): string, go: function(Object)}}
 *   `href` returns the URL with some keys changed, null to remove one
 */
export function queryState(navigate) {
  const href = (changes) => location.pathname + prefixed("?", changed(location.search, changes));
  return {
    get: (key) => new URLSearchParams(location.search).get(key),
    href,
    go: (changes) => navigate(href(changes)),
  };
}

/** Returns the state behind `#`; its members are those of `queryState`. */
export function hashState() {
  const href = (changes) => `#${changed(location.hash.slice(1), changes)}`;
  return {
    get: (key) => new URLSearchParams(location.hash.slice(1)).get(key),
    href,
    go: (changes) => {
      location.hash = href(changes);
    },
  };
}

function changed(text, changes) {
  const values = new URLSearchParams(text);
  for (const [key, value] of Object.entries(changes)) {
    if (value == null) values.delete(key);
    else values.set(key, value);
  }
  return values.toString();
}

function prefixed(mark, text) {
  return text ? mark + text : "";
}
