-- Writes the reference of every op and public function as pages of Markdown, from what `help` shows as well.
--
--   tycho docs/make_reference.lua FOLDER
--
-- ./run docs makes HTML of them. What nothing is written of is an error that lists the names.
local ty = require "tycho"
local documented = require "tycho.documented"
local names = require "tycho.names"
local sources = require "tycho.sources"

local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
local areas = dofile(here .. "areas.lua")
local entries = dofile(here .. "entries.lua")

local M = {}

-- The ops in the order of ops.def, each with the title of its section.
local function op_sections()
  local section, of, order = "", {}, {}
  for line in ty.io.lines(here .. "../src/ops/ops.def") do
    local title = line:match "^/%* %-%-%-%- (.-) %-%-%-%- %*/"
    if title then section = (title:gsub(":%s*[%w_]+/.*$", ""):gsub(";.*$", "")) end
    local name = line:match "^OP%(([%w_]+),"
    if name then
      of[name] = section
      order[#order + 1] = name
    end
  end
  return of, order
end

-- "Capital first".
local function titled(text) return text:sub(1, 1):upper() .. text:sub(2) end

---@class ReferenceItem
---@field name string        "ty.softmax", "nn.Linear": the anchor
---@field short string       as an index shows it
---@field found Description
---@field same ReferenceItem|nil  it is another name of that

---@class ReferenceSection
---@field title string
---@field head string[]      lines of text
---@field items ReferenceItem[]
---@field rank string        what they are sorted by

---@class ReferencePage: Area
---@field sections ReferenceSection[]

-- The section of a name on its page: what stands before its last dot; of a class without a place in a table, and of its
-- methods, its name.
local function section_of(entry, area, path)
  local class = entry.name:match "^(.*):" or entry.name:match "^%u[%w_]*$"
  if class and not class:find "%." then return class end
  local before = entry.name:gsub(":.*$", ""):match "^(.*)%."
  if before then return before end
  if area ~= "tensors" then return area end
  return (path:find "familiar" or path:find "/views%.lua$" or path:find "/grids%.lua$") and "Made of a few ops" or "ty"
end

-- The table that a section is named after.
local function table_named(name)
  local first, rest = name:match "^([^.]+)%.?(.*)$"
  local ok, value = pcall(function() return ty[first] end)
  if not ok or value == nil then
    local there
    there, value = pcall(require, "tycho." .. first)
    if not there then return nil end
  end
  for part in rest:gmatch "[^.]+" do value = type(value) == "table" and value[part] or nil end
  return type(value) == "table" and value or nil
end

--- The pages of the reference, and the names of what has no documentation or no page.
---@return ReferencePage[] pages
---@return string[] bare
function M.collect()
  local pages, by_id = areas.all(names.modules())
  local bare, sections, of_value = {}, {}, {}
  for _, page in ipairs(pages) do page.sections, sections[page.id] = {}, {} end

  local function put(id, title, item, head, is_op)
    local section = sections[id][title]
    if not section then
      local own = title == id or title == "ty"
      section = { title = title, head = head or {}, items = {}, -- the page's own names, ops as they come, the rest
        rank = own and "" or title:find "^%l" and "2" .. title or ("1%04d"):format(#by_id[id].sections) }
      if not is_op and title:find "^%u%w+$" then section.rank = "3" .. title end -- classes
      sections[id][title] = section
      table.insert(by_id[id].sections, section)
    end
    table.insert(section.items, item)
  end

  local by_name, list = documented.ops()
  local section, order = op_sections()
  for _, op in ipairs(list) do
    if not op.flags.INTERNAL and not section[op.name] then bare[#bare + 1] = op.name .. " (not in ops.def)" end
  end
  for _, name in ipairs(order) do
    local op = by_name[name]
    if op and not op.flags.INTERNAL then
      if not op.doc:find "%S" then bare[#bare + 1] = "ty." .. name end
      local id = areas.of_op(op, section[name])
      put(id, id == "random" and "Ops that draw" or titled(section[name]), { name = "ty." .. name, short = name,
        found = documented.op(op) }, nil, true)
    end
  end

  for _, entry in ipairs(names.all()) do
    local method = entry.name:find ":" ~= nil
    local found = documented.entry(entry)
    local name = documented.full_name(entry)
    if not found or sources.sentence(found.comment) == "" then
      bare[#bare + 1] = name
    elseif not (entry.alias and method) then -- what is inherited stands with the first class that has it
      local id = areas.of_name(entry, found.path or "", by_id)
      if not id then
        bare[#bare + 1] = name .. " (no page)"
      else
        local title = section_of(entry, id, found.path or "")
        local item = { name = name, short = entry.name, found = found, same = of_value[entry.value or found] }
        if entry.value and not item.same then of_value[entry.value] = item end
        local holder = not sections[id][title] and table_named(title)
        put(id, title, item, holder and holder ~= ty and documented.head(holder))
      end
    end
  end
  local kept = {}
  for _, page in ipairs(pages) do
    table.sort(page.sections, function(a, b) return a.rank < b.rank end)
    if #page.sections > 0 then kept[#kept + 1] = page end
  end
  return kept, bare
end

--- A page as Markdown. link(name) gives the address of a name, or nil.
---@param page ReferencePage
---@param link fun(name: string): string|nil
---@return string
function M.markdown(page, link)
  local lines = { "# " .. page.title, "" }
  local function add(...) for _, line in ipairs { ... } do lines[#lines + 1] = line end end
  if page.module then add(("    local %s = require %q"):format(page.id, page.module), "") end
  if page.text ~= "" then add(page.text, "") end
  if #page.sections > 1 then
    local links = {}
    for i, section in ipairs(page.sections) do
      links[i] = ("[%s](#section-%s)"):format(section.title, entries.anchor(section.title))
    end
    add(table.concat(links, " · "), "")
  end
  for _, section in ipairs(page.sections) do
    add(("<h2 id=\"section-%s\">%s</h2>"):format(entries.anchor(section.title), entries.escape(section.title)), "")
    add(entries.prose(section.head, link), "")
    for _, item in ipairs(section.items) do add(entries.markdown(item, link), "") end
  end
  return table.concat(lines, "\n")
end

--- Where every name stands: a function for M.markdown.
---@param pages ReferencePage[]
---@param ending string of the files: ".html"
---@return fun(name: string): string|nil link
function M.linker(pages, ending)
  local where = {}
  for _, page in ipairs(pages) do
    for _, section in ipairs(page.sections) do
      for _, item in ipairs(section.items) do
        local address = page.id .. ending .. "#" .. entries.anchor(item.name)
        where[item.name], where[item.short] = address, where[item.short] or address
      end
    end
  end
  return function(name) return where[name] or where[name:gsub("^tycho%.", "")] end
end

--- Raises an error when something has no documentation.
---@param bare string[]
function M.demand(bare)
  if #bare > 0 then
    error(("no documentation: %s\n(a comment of --- above the definition; native functions: lua/tycho/meta)"):format(
      table.concat(bare, " ")), 0)
  end
end

if arg and arg[0] and arg[0]:find "make_reference%.lua$" then
  local folder = arg[1] or "build/docs/reference"
  ty.io.mkdir(folder)
  local pages, bare = M.collect()
  M.demand(bare)
  local link, count = M.linker(pages, ".md"), 0
  for _, page in ipairs(pages) do
    ty.io.write_atomic(("%s/%s.md"):format(folder, page.id), M.markdown(page, link))
    for _, section in ipairs(page.sections) do count = count + #section.items end
  end
  print(("%s: %d names on %d pages"):format(folder, count, #pages))
end

return M
