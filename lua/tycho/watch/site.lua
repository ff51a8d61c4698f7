--- What `tycho watch` answers: the page, and what the page asks for.
--
--   /api/runs                          the runs, as runs.lua lists them
--   /api/about?run=NAME                arguments and pictures of one
--   /api/lines?run=NAME&from=N&mark=M  lines of its metrics from byte N on, at most 2 MiB, below a line of JSON: next
--                                      (where to go on), mark (of what stands before that), more (there is more at
--                                      once), reset (what stood before byte N is something else now: all anew)
--   /file?path=PATH                    a picture below the folder
local core = require "tycho.core"
local arguments = require "tycho.arguments"
local is_host = require "tycho.watch.hosts"
local runs = require "tycho.watch.runs"

local http, encode = core.http_core, core.io.json_encode

local M = {}

local CHUNK, MARKED, MOST_PICTURE = 1 << 21, 256, 1 << 26

local common = {
  ["X-Content-Type-Options"] = "nosniff",
  ["Content-Security-Policy"] = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    .. "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
  ["Cross-Origin-Resource-Policy"] = "same-origin",
  ["Referrer-Policy"] = "no-referrer",
}

local function reply(status, kind, body, more)
  local headers = { ["Content-Type"] = kind, ["Cache-Control"] = "no-store" }
  for name, value in pairs(common) do headers[name] = value end
  for name, value in pairs(more or {}) do headers[name] = value end
  return status, headers, body
end

local function plain(status, text, more) return reply(status, "text/plain; charset=utf-8", text .. "\n", more) end
local function json(value) return reply(200, "application/json", encode(value)) end

-- A number that tells what stands before a byte of a file from what stood there.
local function mark_at(root, path, at)
  local first = math.max(0, at - MARKED)
  local bytes = http.read(root, path, first, at - first) or ""
  local hash = 2166136261
  for i = 1, #bytes do hash = (hash ~ bytes:byte(i)) * 16777619 & 0xffffffff end
  return ("%x"):format(hash)
end

local function lines(self, query)
  if not runs.is_plain(query.run) then return plain(404, "no such run") end
  local path = query.run .. "/metrics.jsonl"
  local from = math.tointeger(tonumber(query.from or "0"))
  if not from or from < 0 then return plain(400, "from: expected a number of bytes") end
  local _, size = http.read(self.root, path, 0, 0)
  if not size then return plain(404, "no such run") end
  local reset = from > size or from > 0 and mark_at(self.root, path, from) ~= query.mark
  if reset then from = 0 end
  local bytes = http.read(self.root, path, from, CHUNK) or ""
  local whole = bytes:match "^.*\n" or #bytes == CHUNK and bytes or "" -- a line longer than that is nobody's
  local next_ = from + #whole
  local head = encode { next = next_, mark = mark_at(self.root, path, next_), more = #bytes == CHUNK, reset = reset }
  return reply(200, "application/octet-stream", head .. "\n" .. whole)
end

local function about(self, query)
  local found = runs.is_plain(query.run) and self.runs:about(query.run)
  if not found then return plain(404, "no such run") end
  return json(found)
end

-- By what they hold: a page in the clothes of a picture is none.
local function kind_of(bytes)
  if bytes:sub(1, 8) == "\x89PNG\r\n\x1a\n" then return "image/png" end
  if bytes:sub(1, 3) == "\xff\xd8\xff" then return "image/jpeg" end
  if bytes:sub(1, 4) == "RIFF" and bytes:sub(9, 12) == "WEBP" then return "image/webp" end
end

local function file(self, query)
  if not runs.is_plain(query.path) or not runs.is_picture(query.path) then return plain(404, "no such picture") end
  local bytes, size = http.read(self.root, query.path, 0, MOST_PICTURE)
  local kind = bytes and size <= MOST_PICTURE and kind_of(bytes)
  if not kind then return plain(404, "no such picture") end
  return reply(200, kind, bytes, { ["Cache-Control"] = "private, max-age=3600" })
end

local function list(self)
  return json { runs = core.io.array(self.runs:all()), folder = self.folder,
    now = core.system.time() }
end

-- The files of the page, from beside this one.
local function read_page()
  local folder = package.searchpath("tycho.watch.site", package.path):match "^(.*/)" or ""
  local page = {}
  for path, entry in pairs { ["/"] = { "page.html", "text/html" }, ["/page.css"] = { "page.css", "text/css" },
    ["/page.js"] = { "page.js", "text/javascript" } } do
    local body = core.io.read(folder .. entry[1])
    page[path] = function() return reply(200, entry[2] .. "; charset=utf-8", body) end
  end
  return page
end

--- The function that answers requests: (method, path, query, host) -> status, headers, body.
---@param root string  the folder, a path without links
---@param host string  the name that the server was given
---@param folder string  the folder as the user named it, for the page
---@return function
function M.new(root, host, folder)
  local self = { root = root, runs = runs.new(root), folder = utf8.len(folder) and folder or "" }
  local places = read_page()
  places["/api/runs"], places["/api/about"], places["/api/lines"], places["/file"] = list, about, lines, file
  return function(method, path, query, asked)
    if not is_host(asked, host:lower()) then return plain(403, "this is not the host that is served here") end
    if method ~= "GET" and method ~= "HEAD" then
      return plain(405, "only GET and HEAD", { Allow = "GET, HEAD" })
    end
    local place = places[path]
    if not place then return plain(404, "there is nothing here") end
    local results = table.pack(pcall(place, self, query))
    if results[1] then return table.unpack(results, 2, results.n) end
    if arguments.interrupted(results[2]) then error(results[2], 0) end
    io.stderr:write("watch: ", path, ": ", tostring(results[2]), "\n")
    return plain(500, "this could not be answered; the terminal says why")
  end
end

return M
