--- In the source tree a module's files are in modules/, where an installed tree has them beside the library. This makes
-- `require "tycho.llm"` and `require "tycho.llm.sampler"` find modules/llm/init.lua (or modules/llm.lua) and
-- modules/llm/sampler.lua there. The `tycho` program runs it at start; env.sh of a build folder arranges the same for
-- plain lua5.4. Running it twice, or in an installed tree, does nothing.

local here = debug.getinfo(1, "S").source:match("^@(.*)lua/tycho/searcher%.lua$")
local modules = here and here .. "modules/"

if modules and not package.loaded["tycho.searcher"] and io.open(modules) then
  package.loaded["tycho.searcher"] = true
  local templates = modules .. "?.lua;" .. modules .. "?/init.lua"
  table.insert(package.searchers, function(name)
    local rest = name:match("^tycho%.(.+)$")
    if not rest then return nil end
    local path, message = package.searchpath(rest, templates)
    if not path then return message end
    local loader, problem = loadfile(path)
    if not loader then error(("error loading module '%s' from file '%s':\n\t%s"):format(name, path, problem)) end
    return loader, path
  end)
end

return true
