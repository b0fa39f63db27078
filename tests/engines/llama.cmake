# Makes llama-server quicker to build; read at each `project()` of llama.cpp. Only ggml computes, so only ggml is
# optimised fully. The library of models is compiled in batches: its many small files read the same large headers.
# Without AMX: some virtual machines report it, and fault at `ldtilecfg`.
if(PROJECT_NAME STREQUAL "ggml")
  set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
  endif()
else()
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
  cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endif()
