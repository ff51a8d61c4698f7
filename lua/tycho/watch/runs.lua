--- The training runs below a folder: what `tycho watch` shows of them without reading their metrics through.
--
--   FOLDER/metrics.jsonl   makes a folder a run: a JSON object of numbers for each step (train.Logger)
--   FOLDER/run.json        how many steps it is to have, and the options of its training (train.Logger)
--   FOLDER/recipe.json     the recipe that runs and its arguments, here or in the folder above; metrics.json: that it
--                          is done
--   FOLDER/*.png ...       pictures, also of folders below that are no runs themselves, and of a recipe's folder above
--
-- All of it is hostile until it is checked: files may be anything, and change at any time.
local core = require "tycho.core"
local program = require "tycho.program"

local http, clock = core.http_core, core.system.clock

local M = {}
local Runs = {}
Runs.__index = Runs

local DEEPEST, MOST_FOLDERS, MOST_PICTURES = 12, 20000, 2000
local MOST_TEXT, TAIL = 1 << 18, 1 << 14
local pictures = { png = true, jpg = true, jpeg = true, webp = true }

--- The runs below `root`, a path without links.
---@param root string
function M.new(root)
  return setmetatable({ root = root, seen = {}, list = {}, due = 0 }, Runs)
end

--- Whether a path, as a page names it, may lie below the folder at all. Links are looked at when it is read.
function M.is_plain(path)
  return type(path) == "string" and #path > 0 and #path < 4096 and not path:find "[%c\\]" and path:sub(1, 1) ~= "/"
    and not ("/" .. path .. "/"):find("/../", 1, true)
end

--- The kind of a picture by its name, for those that are shown.
function M.is_picture(name) return pictures[(name:match "%.(%w+)$" or ""):lower()] == true end

-- Below a folder: the root itself is "." in paths from there.
local function join(folder, name)
  return folder == "." and name or (folder == "/" and "" or folder) .. "/" .. name
end
local function above(folder) return folder ~= "." and (folder:match "^(.*)/" or ".") or nil end

-- Size and time of a file below the root; nil where there is none.
function Runs:stat(path)
  local _, size, changed = http.read(self.root, path, 0, 0)
  return size, changed
end

local function finite(value)
  if type(value) == "number" and value == value and math.abs(value) < 1e300 then return value end
end

-- The table of a small JSON file and its text, kept until it changes.
function Runs:small(path)
  local size, changed = self:stat(path)
  local kept = self.seen[path]
  if not size then
    self.seen[path] = nil
    return nil
  end
  if not kept or kept.size ~= size or kept.changed ~= changed then
    kept = { size = size, changed = changed }
    local text = size <= MOST_TEXT and http.read(self.root, path, 0, MOST_TEXT)
    local ok, value = pcall(core.io.json_decode, text or "")
    if ok and type(value) == "table" and utf8.len(text) then kept.value, kept.text = value, text end
    self.seen[path] = kept
  end
  return kept
end

-- The last steps of a run and how fast they came, from the end of its file.
function Runs:tail(path, size, changed)
  local kept = self.seen[path]
  if kept and kept.size == size and kept.changed == changed then return kept end
  kept = { size = size, changed = changed }
  self.seen[path] = kept
  local text = http.read(self.root, path, math.max(0, size - TAIL), TAIL) or ""
  local first, last, count = nil, nil, 0
  for line in (size > TAIL and text:gsub("^[^\n]*\n", "") or text):gmatch "([^\n]+)\n" do
    local ok, entry = pcall(core.io.json_decode, line)
    local step = ok and type(entry) == "table" and finite(entry.step)
    if step then
      if last and step < last.step then first, count = nil, 0 end -- the file of a run that began anew
      last = { step = step, time = finite(entry.time) }
      first, count = first or last, count + 1
    end
  end
  if last then
    kept.step = last.step
    local seconds = last.time and first.time and last.time - first.time or 0
    if seconds >= 3 then kept.rate, kept.interval = (last.step - first.step) / seconds, seconds / (count - 1) end
  end
  return kept
end

-- Pictures below a folder, those of other runs left out.
function Runs:pictures_of(folder, names, list, depth)
  for _, name in ipairs(names) do
    if #list >= MOST_PICTURES then return end
    local path = join(folder, name)
    if name:sub(-1) ~= "/" and M.is_picture(name) and utf8.len(name) then
      local size, changed = self:stat(path)
      if size then list[#list + 1] = { path = path, size = size, changed = changed } end
    elseif name:sub(-1) == "/" and depth > 0 and name:sub(1, 1) ~= "." and name ~= "checkpoint/" then
      -- Not where links lead.
      local plain = http.real(join(self.root, path)) == join(self.root, path:sub(1, -2))
      local below, is_run = plain and program.list(join(self.root, path)) or {}, false
      for _, other in ipairs(below) do is_run = is_run or other == "metrics.jsonl" end
      if not is_run then self:pictures_of(path:sub(1, -2), below, list, depth - 1) end
    end
  end
end

-- Each folder with metrics, depth first; a folder that links lead to twice counts once, and one outside never.
function Runs:walk(folder, depth, found, visited)
  local real = http.real(join(self.root, folder))
  if not real or visited[real] or visited.count >= MOST_FOLDERS then return end
  if self.root ~= "/" and real ~= self.root and real:sub(1, #self.root + 1) ~= self.root .. "/" then return end
  visited[real], visited.count = true, visited.count + 1
  local names = program.list(join(self.root, folder)) or {}
  for _, name in ipairs(names) do
    if name == "metrics.jsonl" and utf8.len(folder) then found[#found + 1] = { name = folder, names = names } end
  end
  if depth == 0 then return end
  for _, name in ipairs(names) do
    if name:sub(-1) == "/" and name:sub(1, 1) ~= "." then
      self:walk(join(folder, name:sub(1, -2)), depth - 1, found, visited)
    end
  end
end

-- "finished", "paused", "running" or "stalled".
local function state_of(run, about, tail, done, now)
  if about.steps and run.step and run.step >= about.steps then return "finished" end
  if done and done >= run.changed then return "finished" end
  if about.stop and run.step and run.step >= about.stop then return "paused" end
  local patience = math.max(60, 20 * (tail.interval or 0))
  return now - run.changed < patience and "running" or "stalled"
end

function Runs:describe(found, now)
  local name = found.name
  local path = join(name, "metrics.jsonl")
  local size, changed = self:stat(path)
  if not size then return nil end
  local tail = self:tail(path, size, changed)
  local kept = self:small(join(name, "run.json"))
  local value = kept and kept.value or {}
  local about = { steps = finite(value.steps), stop = finite(value.stop), start = finite(value.start),
    began = finite(value.began) }
  local up = above(name)
  local recipe = self:small(join(name, "recipe.json")) or up and self:small(join(up, "recipe.json"))
  local _, done = self:stat(join(name, "metrics.json"))
  local _, done_above = nil, nil
  if up then _, done_above = self:stat(join(up, "metrics.json")) end
  local run = { name = name, size = size, changed = changed, step = tail.step, steps = about.steps }
  run.state = state_of(run, about, tail, math.max(done or 0, done_above or 0), now)
  local rate = tail.rate
  if not rate and about.began and about.start and tail.step and changed - about.began > 1 then
    rate = (tail.step - about.start) / (changed - about.began)
  end
  if rate and rate > 0 then
    run.rate = rate
    if run.state == "running" and run.steps then run.left = (run.steps - run.step) / rate end
  end
  local list = {}
  self:pictures_of(name, found.names, list, 2)
  if up and (recipe or done_above) then self:pictures_of(up, program.list(join(self.root, up)) or {}, list, 0) end
  local newest = math.max(kept and kept.changed or 0, recipe and recipe.changed or 0, done or 0, done_above or 0)
  for _, picture in ipairs(list) do newest = math.max(newest, picture.changed) end
  run.version = ("%d %.3f"):format(#list, newest) -- changes when about() has something else to say
  self.about_of[name] = { pictures = list, run = kept and kept.text, recipe = recipe and recipe.text,
    results = done and join(name, "metrics.json") or done_above and join(up, "metrics.json") or nil }
  return run
end

--- The runs in order of their names: name (the path below the folder), size and changed of the metrics, step, steps,
-- state, rate (steps a second), left (seconds), version. Looked up at most every two seconds, and less often where that
-- takes long.
function Runs:all()
  local began = clock()
  if began < self.due then return self.list end
  local found, list, now = {}, {}, core.system.time()
  self:walk(".", DEEPEST, found, { count = 0 })
  self.about_of = {}
  for _, entry in ipairs(found) do list[#list + 1] = self:describe(entry, now) end
  table.sort(list, function(a, b) return a.name < b.name end)
  self.list = list
  local ended = clock()
  self.due = ended + math.max(1.5, 10 * (ended - began))
  return list
end

--- What a run is: the texts of run.json, recipe.json and metrics.json, and its pictures. nil: there is no such run.
function Runs:about(name)
  self:all()
  local about = self.about_of[name]
  if not about then return nil end
  local results = about.results and self:small(about.results)
  return { run = about.run, recipe = about.recipe, results = results and results.text,
    pictures = core.io.array(about.pictures) }
end

return M
