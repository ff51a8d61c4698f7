-- ./run docs: every page is there, its links lead somewhere, the search knows all names. Takes the program cmark-gfm,
-- which ./run installs; where that is missing, only the parts that need none are looked at.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"

if not ty.io.exists(check.root .. "docs/make_html.lua") then -- a bundle
  check.finish()
  return
end

local highlight = dofile(check.root .. "docs/highlight.lua")

check.test("colours", function()
  check.equal(highlight.lua 'local x = "a<b" -- so\nreturn 1', '<span class="k">local</span> x = '
    .. '<span class="s">&quot;a&lt;b&quot;</span> <span class="c">-- so</span>\n<span class="k">return</span> '
    .. '<span class="n">1</span>')
  check.equal(highlight.lua 'print("open', 'print(<span class="s">&quot;open</span>')
  check.equal(highlight.c "#include <tycho.h>\nint x = 2; /* why */", '<span class="k">#include</span> '
    .. '<span class="s">&lt;tycho.h&gt;</span>\n<span class="k">int</span> x = <span class="n">2</span>; '
    .. '<span class="c">/* why */</span>')
end)

if os.execute "command -v cmark-gfm > /dev/null 2>&1" then
  check.test("the site", function()
    local folder = scratch.file "html"
    local pages = dofile(check.root .. "docs/make_html.lua").write(folder)
    local texts, anchors, count = {}, {}, 0
    for _, name in ipairs(ty.io.listdir(folder)) do
      local id = name:match "^(.*)%.html$"
      if id then
        texts[name] = ty.io.read(folder .. "/" .. name)
        for anchor in texts[name]:gmatch 'id="([^"]*)"' do anchors[name .. "#" .. anchor] = true end
        count = count + 1
      end
    end
    check.equal(count, pages + 1, "pages, and index.html")
    local links = 0
    for name, text in pairs(texts) do
      for address in text:gmatch '[a-z]="([^"%s]+)"' do
        local file, fragment = address:match "^([^#:]*)(#?[^:]*.*)$"
        if file and file:find "%.html$" and not file:find "/" then
          links = links + 1
          check.ok(texts[file], ("%s: a link to %s"):format(name, file))
          check.ok(fragment == "" or anchors[file .. fragment], ("%s: a link to %s"):format(name, address))
        elseif file and file:find "%.png$" then
          check.ok(ty.io.exists(folder .. "/" .. file), ("%s: the picture %s"):format(name, file))
        elseif file and file:find "^%.%./%.%./%.%./" then
          check.ok(ty.io.exists(check.root .. file:sub(10)), ("%s: a link to %s"):format(name, file))
        end
      end
      check.ok(not text:find "https?://[%w./-]+%.[cj]ss?\"", name .. " needs no network")
    end
    check.ok(links > 1000, links .. " links")
    local index = ty.io.json_decode(ty.io.read(folder .. "/index.js"):match "^const index = (.*);%s*$")
    local known = {}
    for _, entry in ipairs(index) do
      known[entry[1]] = entry
      local file, fragment = entry[2]:match "^([^#]*)(.*)$"
      check.ok(texts[file] and (fragment == "" or anchors[file .. fragment]), "the index leads to " .. entry[2])
    end
    for _, name in ipairs { "ty.softmax", "ty.nn.Linear", "llm.load", "Optimizer:step", "Two commands" } do
      check.ok(known[name], "the search finds " .. name)
    end
    check.ok(known["ty.softmax"][3]:find "exp", "with its sentence")
  end)
else
  print "without cmark-gfm: no pages are made"
end

scratch.clean()
check.finish()
