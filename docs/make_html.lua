-- Makes the documentation as HTML: the reference, the tutorials and the pages of docs/, README and CONTRIBUTING.
--
--   tycho docs/make_html.lua FOLDER        ./run docs does so into build/docs/html
--
-- Markdown is read by cmark-gfm (Debian's package of that name). The pages need no network: style and search are files
-- beside them.
local ty = require "tycho"

local here = debug.getinfo(1, "S").source:match "^@(.*/)" or "./"
local reference = dofile(here .. "make_reference.lua")
local entries = dofile(here .. "entries.lua")
local highlight = dofile(here .. "highlight.lua")
local escape = entries.escape

local M = {}

local root = here .. "../"

--- Where the pages find the files of the source tree that have no page: build/docs/html is three folders down.
M.tree = "../../../"

-- Documents that are written by hand: id of the page, file, group of the navigation.
local function documents()
  local list = { { "readme", "README.md", "Tycho" } }
  local tutorials = {}
  for _, name in ipairs(ty.io.exists(here .. "tutorials") and ty.io.listdir(here .. "tutorials") or {}) do
    local id = name:match "^(%d+%-.*)%.md$"
    if id then tutorials[#tutorials + 1] = { id, "docs/tutorials/" .. name, "Tutorials" } end
  end
  table.sort(tutorials, function(a, b) return tonumber(a[1]:match "%d+") < tonumber(b[1]:match "%d+") end)
  table.move(tutorials, 1, #tutorials, #list + 1, list)
  for _, page in ipairs { { "pytorch", "docs/pytorch.md", "Tycho" }, { "systems", "docs/systems.md", "Tycho" },
    { "examples", "examples/README.md", "Tycho" }, { "contributing", "CONTRIBUTING.md", "Tycho" } } do
    if ty.io.exists(root .. page[2]) then list[#list + 1] = page end
  end
  return list
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Markdown as HTML, of many pages by one process each.
local function cmark(text, folder)
  local path = folder .. "/.page.md"
  ty.io.write_atomic(path, text)
  local pipe = assert(io.popen(("cmark-gfm --unsafe -e table -e autolink -e strikethrough %s"):format(quoted(path))))
  local html = pipe:read "a"
  local ok = pipe:close()
  os.remove(path)
  if not ok then error("cmark-gfm failed: is Debian's package cmark-gfm installed?", 0) end
  return html
end

local entities = { ["&amp;"] = "&", ["&lt;"] = "<", ["&gt;"] = ">", ["&quot;"] = '"' }
local function unescape(text) return (text:gsub("&%a+;", entities)) end

-- "Your own data" -> your-own-data, as GitHub names headings.
local function slug(html)
  local text = unescape(html:gsub("<[^>]*>", "")):lower()
  return (text:gsub("[^%w%s_-]", ""):gsub("%s", "-"))
end

-- Anchors for headings that have none, colours for code.
local function finish(html)
  html = html:gsub("<h([1-4])>(.-)</h%1>", function(level, text)
    return ('<h%s id="%s">%s</h%s>'):format(level, slug(text), text, level)
  end)
  html = html:gsub("<pre><code class=\"language%-(%w+)\">(.-)</code></pre>", function(language, code)
    local text = unescape(code)
    if language == "lua" then text = highlight.lua(text)
    elseif language == "signature" then text = highlight.lua(text)
    elseif language == "c" then text = highlight.c(text)
    else text = escape(text) end
    return ('<pre class="%s"><code>%s</code></pre>'):format(language, text)
  end)
  return html
end

-- ---- links between documents ----

-- A link of a document, "../tutorials/x.md#a" in docs/y.md, as one of the site. Pictures are copied beside the pages.
local function link_of(address, file, by_file, pictures)
  if address:find "^%a+:" or address:find "^#" then return address end
  local path, fragment = address:match "^([^#]*)(#?.*)$"
  local parts = {}
  for part in ((file:match "^(.*/)" or "") .. path):gmatch "[^/]+" do
    if part == ".." then parts[#parts] = nil
    elseif part ~= "." then parts[#parts + 1] = part end
  end
  path = table.concat(parts, "/")
  if by_file[path] then return by_file[path] .. ".html" .. fragment end
  local ending = path:match "%.(%w+)$"
  if ending == "png" or ending == "svg" then
    local name = path:gsub("/", "-")
    pictures[name] = path
    return name
  end
  return M.tree .. path .. fragment
end

-- ---- the frame ----

local function navigation(groups, current)
  local lines = {}
  for _, group in ipairs(groups) do
    lines[#lines + 1] = ("<h4>%s</h4><ul>"):format(escape(group.title))
    for _, page in ipairs(group) do
      lines[#lines + 1] = ('<li%s><a href="%s.html">%s</a></li>'):format(page.id == current and ' class="here"' or "",
        page.id, escape(page.title))
    end
    lines[#lines + 1] = "</ul>"
  end
  return table.concat(lines, "\n")
end

local function frame(title, groups, id, body)
  return ([[<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>%s - Tycho</title><link rel="stylesheet" href="style.css"></head>
<body><nav><a class="logo" href="index.html">Tycho</a>
<input id="search" type="search" placeholder="Search ( / )" aria-label="Search" autocomplete="off">
<ol id="found"></ol>
<div id="pages">%s</div></nav>
<main>%s</main>
<script src="index.js"></script><script src="search.js"></script></body></html>
]]):format(escape(title), navigation(groups, id), body)
end

-- ---- search ----

-- { name, address, sentence } of everything that can be found.
local function index_of(pages, written)
  local list = {}
  for _, page in ipairs(pages) do
    for _, section in ipairs(page.sections) do
      for _, item in ipairs(section.items) do
        local text = table.concat(item.found.text, " "):match "^%s*(.-)%s*$"
        list[#list + 1] = ty.io.array { item.name, page.id .. ".html#" .. entries.anchor(item.name),
          (text:match "^(.-%.)%s" or text):sub(1, 160) }
      end
    end
  end
  for _, page in ipairs(written) do
    for level, id, title in page.html:gmatch '<h([1-3]) id="([^"]*)">(.-)</h' do
      title = unescape(title:gsub("<[^>]*>", ""))
      list[#list + 1] = ty.io.array { title, page.id .. ".html" .. (level == "1" and "" or "#" .. id),
        level == "1" and "" or page.title }
    end
  end
  return list
end

-- ---- all of it ----

--- Writes the site into a folder, which is made.
---@param folder string
---@return integer pages
function M.write(folder)
  ty.io.mkdir(folder)
  local pages, bare = reference.collect()
  reference.demand(bare)
  local link = reference.linker(pages, ".html")
  local written, by_file, pictures = {}, {}, {}
  for i, document in ipairs(documents()) do
    written[i] = { id = document[1], file = document[2], group = document[3] }
    by_file[document[2]] = document[1]
  end
  for _, page in ipairs(written) do
    local text = ty.io.read(root .. page.file)
    page.title = page.id == "readme" and "What Tycho is" or text:match "^# ([^\n]+)" or page.id
    local html = finish(cmark(text, folder))
    page.html = html:gsub('(<%a+ [^>]-)(%f[%a]%a+)="([^"]*)"', function(before, key, address)
      if key ~= "href" and key ~= "src" then return nil end
      return ('%s%s="%s"'):format(before, key, link_of(address, page.file, by_file, pictures))
    end)
    -- `ty.softmax` in a text leads to the reference.
    page.html = page.html:gsub("(<?/?%a*>?)<code>([%w_.:]+)</code>", function(before, name)
      local address = before:find "^<a" and nil or name:find "[.:]" and link(name)
      return address and ('%s<a href="%s"><code>%s</code></a>'):format(before, address, name) or nil
    end)
  end

  local groups = { { title = "Tycho" }, { title = "Tutorials" }, { title = "Library" }, { title = "Modules" } }
  local function into(group, page) table.insert(groups[group], page) end
  for _, page in ipairs(written) do into(page.group == "Tutorials" and 2 or 1, page) end
  for _, page in ipairs(pages) do into(page.module and 4 or 3, page) end
  for i = #groups, 1, -1 do if #groups[i] == 0 then table.remove(groups, i) end end

  for _, page in ipairs(written) do
    ty.io.write_atomic(("%s/%s.html"):format(folder, page.id), frame(page.title, groups, page.id, page.html))
    if page.id == "readme" then
      ty.io.write_atomic(folder .. "/index.html", frame("Deep learning for Lua", groups, page.id, page.html))
    end
  end
  for _, page in ipairs(pages) do
    local html = finish(cmark(reference.markdown(page, link), folder))
    ty.io.write_atomic(("%s/%s.html"):format(folder, page.id), frame(page.title, groups, page.id, html))
  end
  for name, path in pairs(pictures) do ty.io.write_atomic(folder .. "/" .. name, ty.io.read(root .. path)) end
  for _, name in ipairs { "style.css", "search.js" } do
    ty.io.write_atomic(folder .. "/" .. name, ty.io.read(here .. "html/" .. name))
  end
  ty.io.write_atomic(folder .. "/index.js", "const index = " .. ty.io.json_encode(ty.io.array(index_of(pages, written)))
    .. ";\n")
  return #pages + #written
end

if arg and arg[0] and arg[0]:find "make_html%.lua$" then
  local folder = arg[1] or "build/docs/html"
  print(("%d pages: %s/index.html"):format(M.write(folder), folder))
end

return M
