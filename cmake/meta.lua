-- tycho cmake/meta.lua FILE: writes the declarations of the ops.
require("tycho.meta").write((...))
