"use strict";
let api = null;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// Text with `code` in it.
function prose(text) {
  const parts = text.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part));
  return make("span", "", ...parts);
}

function resolve(schema) {
  if (!schema?.$ref) return schema ?? {};
  return schema.$ref.slice(2).split("/").reduce((place, key) => place[key], api);
}

// "integer 1..16", "text | list of integer": a schema in a few words.
function kind(schema) {
  schema = resolve(schema);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kind))].filter((word) => word !== "null").join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items)}${bounds(schema, "minItems", "maxItems")}`;
  if (schema.type === "string") return `string${bounds(schema, "minLength", "maxLength", " characters")}`;
  if (schema.type === "object" && schema.additionalProperties?.type) {
    return `object of ${kind(schema.additionalProperties)}${bounds(schema, "minProperties", "maxProperties")}`;
  }
  const words = { integer: "integer", number: "number", boolean: "true | false", object: "object", null: "null" };
  return `${words[schema.type] ?? "anything"}${range(schema)}`;
}

// Bounds of integer types say nothing to people.
const LARGE = 2 ** 31 - 1;
function range({ minimum, maximum, exclusiveMinimum }) {
  const low = exclusiveMinimum !== undefined ? `> ${exclusiveMinimum}` : minimum > -LARGE ? `>= ${minimum}` : "";
  const high = maximum < LARGE ? `<= ${maximum}` : "";
  return low || high ? ` (${[low, high].filter(Boolean).join(", ")})` : "";
}

function bounds(schema, least, most, unit = "") {
  const parts = [];
  if (schema[least] > (unit ? 1 : 0)) parts.push(`at least ${schema[least]}`);
  if (schema[most]) parts.push(`at most ${schema[most]}`);
  return parts.length ? ` (${parts.join(", ")}${unit})` : "";
}

// The object inside a schema whose fields are worth showing: itself, an element's or an alternative's.
function inner(schema) {
  schema = resolve(schema);
  if (schema.properties) return schema;
  if (schema.items) return inner(schema.items);
  if (schema.additionalProperties) return inner(schema.additionalProperties);
  for (const option of schema.anyOf ?? []) {
    const found = inner(option);
    if (found) return found;
  }
  return null;
}

const takesNull = (schema) => (schema.anyOf ?? []).some((option) => option.type === "null");

function row(term, ...text) {
  return make("div", "", make("dt", "", ...term), make("dd", "", ...text));
}

// A request's optional fields all take null and are most; of an answer's, both are worth saying.
function fields(schema, isRequest) {
  const list = make("dl", "fields");
  const isLast = ([name]) => !schema.required?.includes(name);
  const entries = Object.entries(schema.properties ?? {}).sort((a, b) => isLast(a) - isLast(b));
  for (const [name, raw] of entries) {
    const field = resolve(raw);
    const isRequired = schema.required?.includes(name);
    const term = [make("code", "", name)];
    if (isRequest && isRequired) term.push(" ", make("b", "", "required"));
    if (!isRequest && !isRequired) term.push(" ", make("span", "quiet", "not always"));
    const text = [make("div", "kind", kind(raw) + (!isRequest && takesNull(raw) ? " | null" : ""))];
    const about = raw.description ?? (raw.$ref ? undefined : field.description);
    if (about) text.push(prose(about));
    if (raw.default !== undefined && raw.default !== "") {
      text.push(about ? " " : "", make("span", "quiet", `Default: ${JSON.stringify(raw.default)}`));
    }
    const shown = row(term, ...text);
    const nested = inner(raw);
    if (nested) shown.append(make("dd", "inside", fields(nested, isRequest)));
    list.append(shown);
  }
  return list;
}

function curl(path, method, operation, example) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const parts = [`curl ${base}${path}`];
  if (operation.security === undefined && api.security) parts.push('-H "Authorization: Bearer $KEY"');
  if (method === "post") parts.push(`-H 'Content-Type: application/json'`, `-d '${JSON.stringify(example ?? {})}'`);
  return make("pre", "", parts.join(" \\\n  "));
}

function route(path, method, operation) {
  const needsKey = operation.security === undefined && api.security;
  const head = make(
    "summary", "",
    make("span", "method", method.toUpperCase()),
    make("span", "path", path),
    make("span", "quiet", operation.summary),
    make("span", "quiet tag", needsKey ? "needs a key" : "open"),
  );
  const content = make("div", "");
  const details = make("details", "route", head, content);
  details.id = operation.operationId;
  // Filled when it is opened: most never are.
  details.addEventListener("toggle", () => {
    if (!details.open || content.firstChild) return;
    const body = operation.requestBody?.content["application/json"].schema;
    content.append(make("h3", "", "Example"), curl(path, method, operation, resolve(body).examples?.[0]));
    for (const parameter of operation.parameters ?? []) {
      const about = row([make("code", "", parameter.name)], prose(parameter.description));
      content.append(make("h3", "", "In the path"), make("dl", "fields", about));
    }
    if (body) content.append(make("h3", "", "Request"), fields(resolve(body), true));
    const errors = make("dl", "fields");
    for (const [status, raw] of Object.entries(operation.responses)) {
      const response = resolve(raw);
      if (status !== "200") {
        errors.append(row([make("code", "", status)], prose(response.description)));
        continue;
      }
      content.append(make("h3", "", prose(response.description)));
      const headers = Object.entries(response.headers).map(([name, header]) =>
        row([make("code", "", name)], prose(resolve(header).description)));
      content.append(make("p", "quiet", "Headers"), make("dl", "fields", ...headers));
      for (const [media, { schema }] of Object.entries(response.content)) {
        content.append(make("p", "quiet", media));
        const shown = inner(schema.properties?.data?.anyOf[0].contentSchema ?? schema);
        if (shown) content.append(fields(shown, false));
      }
    }
    content.append(make("h3", "", "Errors"), errors);
  });
  return details;
}

function show() {
  const page = document.getElementById("docs");
  document.getElementById("version").textContent = api.info.version;
  page.replaceChildren(make("p", "", prose(api.info.description)));
  const tags = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!tags.has(tag)) tags.set(tag, make("section", "", make("h2", "", tag)));
      tags.get(tag).append(route(path, method, operation));
    }
  }
  const errors = make("section", "", make("h2", "", "Errors"), make("p", "", "One shape, whatever went wrong:"));
  errors.append(fields(api.components.schemas.ErrorAnswer, false));
  page.append(...tags.values(), errors);
  const wanted = document.getElementById(location.hash.slice(1));
  if (wanted) wanted.open = true;
}

fetch("openapi.json")
  .then((response) => response.ok ? response.json() : Promise.reject(new Error(`HTTP ${response.status}`)))
  .then((document) => { api = document; show(); })
  .catch((error) => {
    const box = make("p", "problem", `The document did not load: ${error.message}`);
    box.setAttribute("role", "alert");
    document.getElementById("docs").replaceChildren(box);
  });
